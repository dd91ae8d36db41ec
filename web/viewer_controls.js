/** The buttons around a viewer's picture, and its line of pixel values. */

import { MODES } from "./picture.js";

/** A new DOM element with `properties`. */
export function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function button(text, label, act) {
  return element("button", { type: "button", textContent: text, ariaLabel: label, title: label, onclick: act });
}

/** Rows `modes`, `comparison` and `bottom`, which call the viewer and show how it stands. */
export class Toolbar {
  constructor(viewer) {
    this.viewer = viewer;
    this.makeModes();
    this.makeComparison();
    this.makeBottom();
  }

  makeModes() {
    this.modeButtons = Object.entries(MODES).map(([mode, text]) => {
      const choose = () => this.viewer.choose("coreai_rgba_mode", mode);
      return Object.assign(button(text, TITLES[mode], choose), { value: mode });
    });
    const properties = { className: "coreai-rgba-row coreai-rgba-modes", role: "group", ariaLabel: "Shown on" };
    this.modes = element("div", properties, ...this.modeButtons);
  }

  makeComparison() {
    const { viewer } = this;
    this.slider = element("input", {
      type: "range",
      max: 1,
      step: 0.01,
      ariaLabel: "Share of the background shown without the picture",
      oninput: () => viewer.set("coreai_rgba_split", this.slider.valueAsNumber),
      onchange: () => viewer.choose("coreai_rgba_split", this.slider.valueAsNumber),
    });
    this.colour = element("input", {
      type: "color",
      ariaLabel: "Background colour",
      title: "Background colour",
      oninput: () => viewer.set("coreai_rgba_background", this.colour.value),
      onchange: () => viewer.choose("coreai_rgba_background", this.colour.value),
    });
    const chooser = element("input", {
      type: "file",
      accept: "image/*",
      onchange: () => chooser.files.length && viewer.uploadBackground(chooser.files[0]),
    });
    const choose = button("Picture…", "Choose a background picture", () => chooser.click());
    this.comparison = element("div", { className: "coreai-rgba-row" }, this.slider, this.colour, choose);
  }

  makeBottom() {
    const { viewer } = this;
    this.zoomButton = button("All", "Show all of the picture", () => viewer.showAll());
    this.pixel = element("span", { className: "coreai-rgba-pixel" });
    this.live = element("span", { className: "coreai-rgba-unseen", role: "status" });
    this.count = element("span");
    this.pages = element(
      "span",
      { className: "coreai-rgba-row" },
      button("‹", "Previous picture", () => viewer.go(viewer.index - 1)),
      this.count,
      button("›", "Next picture", () => viewer.go(viewer.index + 1)),
    );
    this.bottom = element(
      "div",
      { className: "coreai-rgba-row" },
      button("−", "Zoom out", () => viewer.zoomOut()),
      this.zoomButton,
      button("+", "Zoom in", () => viewer.zoomIn()),
      this.pixel,
      this.pages,
      this.live,
    );
  }

  showSettings() {
    const { viewer } = this;
    for (const made of this.modeButtons) made.ariaPressed = String(made.value === viewer.mode);
    this.comparison.hidden = viewer.mode !== "compare";
    this.slider.value = viewer.setting("coreai_rgba_split");
    const background = viewer.setting("coreai_rgba_background");
    if (background.startsWith("#")) this.colour.value = background;
  }

  /** `scale` in CSS pixels per pixel. */
  showZoom(scale) {
    this.zoomButton.textContent = `${Math.round(100 * scale)} %`;
  }

  showPictures() {
    const { files, index } = this.viewer;
    this.pages.hidden = files.length < 2;
    this.count.textContent = `${index + 1} / ${files.length}`;
  }

  /** `values` are red, green, blue and alpha, 0 to 255; without them nothing is shown. */
  showPixel(x, y, values) {
    const named = values && [...values].map((value, channel) => `${"RGBA"[channel]} ${value}`);
    this.pixel.textContent = values ? `${x}, ${y}: ${named.join(" ")}` : "";
  }

  announcePixel() {
    this.live.textContent = this.pixel.textContent;
  }

  /** Something to read, for eyes and screen readers. */
  announce(text) {
    this.pixel.textContent = this.live.textContent = text;
  }
}

const TITLES = {
  checkerboard: "On a checkerboard",
  white: "On white",
  black: "On black",
  alpha: "Alpha alone: white is opaque",
  compare: "Before and after, on a background of yours",
};
