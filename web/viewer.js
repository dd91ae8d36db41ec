/** The decode node's viewer: the picture on several backgrounds, zoom, and exact pixel values. */

import { api } from "../../scripts/api.js";
import { addPanel, asChange, onOutput } from "./graph.js";
import { MODES, Picture, draw } from "./picture.js";
import { decodePng } from "./png.js";
import { View } from "./view.js";
import { Toolbar, element } from "./viewer_controls.js";

const NODE = "CoreAIRGBADecode";
const HEIGHT = 340;
const ZOOM_STEP = 1.25;
const FAR = 10; // pixels an arrow key goes with shift
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** What a workflow keeps of a viewer, in the node's properties, and what holds until something is chosen. */
const DEFAULTS = { coreai_rgba_mode: "checkerboard", coreai_rgba_split: 0.5, coreai_rgba_background: "#7f9f7f" };

export function isDecoder(node) {
  return node.comfyClass === NODE;
}

export function addViewer(node) {
  const viewer = new Viewer(node);
  addPanel(node, "viewer", viewer.element, { height: HEIGHT, grows: true });
  onOutput(node, ({ pictures }) => viewer.open(pictures));
  const before = node.onConfigure;
  node.onConfigure = function () {
    before?.apply(this, arguments);
    viewer.settingsChanged();
  };
  node.setSize([Math.max(node.size[0], 360), node.computeSize()[1]]);
}

class Viewer {
  constructor(node) {
    this.node = node;
    this.view = new View();
    this.files = [];
    this.index = 0;
    this.canvas = element("canvas", { ariaHidden: "true" });
    const hint = "Run the workflow to see the picture";
    this.message = element("p", { className: "coreai-rgba-message", textContent: hint });
    this.stage = element("div", { className: "coreai-rgba-stage", tabIndex: 0, role: "application" });
    this.stage.append(this.canvas, this.message);
    this.toolbar = new Toolbar(this);
    this.element = element("div", { className: "coreai-rgba-viewer", role: "group", ariaLabel: "Picture viewer" });
    this.element.append(this.toolbar.modes, this.stage, this.toolbar.comparison, this.toolbar.bottom);
    this.listen();
    this.describe();
    this.settingsChanged();
  }

  listen() {
    new ResizeObserver(() => this.redraw()).observe(this.stage);
    this.stage.addEventListener("pointerdown", (event) => this.startDrag(event));
    this.stage.addEventListener("pointermove", (event) => this.pointAt(event));
    this.stage.addEventListener("pointerleave", () => this.toolbar.showPixel());
    this.stage.addEventListener("keydown", (event) => this.pressed(event));
    this.stage.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    // Nodes 2.0 takes the wheel before it gets here, except where it finds this attribute.
    this.stage.addEventListener("focus", () => (this.stage.dataset.captureWheel = "true"));
    this.stage.addEventListener("blur", () => delete this.stage.dataset.captureWheel);
  }

  // What a workflow keeps.

  setting(name) {
    return this.node.properties[name] ?? DEFAULTS[name];
  }

  /** While a control is moved. */
  set(name, value) {
    this.node.setProperty(name, value);
    this.settingsChanged();
  }

  /** When something was chosen. */
  choose(name, value) {
    asChange(() => this.set(name, value));
  }

  get mode() {
    const mode = this.setting("coreai_rgba_mode");
    return mode in MODES ? mode : DEFAULTS.coreai_rgba_mode; // anything can be typed into a property
  }

  async settingsChanged() {
    this.toolbar.showSettings();
    const wanted = this.setting("coreai_rgba_background");
    if (wanted !== this.backgroundWanted) {
      this.backgroundWanted = wanted;
      this.background = wanted.startsWith("#") ? wanted : DEFAULTS.coreai_rgba_background;
      if (!wanted.startsWith("#")) await this.loadBackground(wanted);
    }
    this.redraw();
  }

  async loadBackground(name) {
    const image = new Image();
    image.src = api.apiURL(`/view?${fileQuery(name)}`);
    try {
      await image.decode();
    } catch {
      this.toolbar.announce(`The background ${name} is gone or no picture: choose another`);
      return;
    }
    if (name === this.backgroundWanted) this.background = image;
  }

  /** Put a picture of the user's into ComfyUI's input folder and show it as background. */
  async uploadBackground(file) {
    const body = new FormData();
    body.append("image", file);
    body.append("subfolder", "coreai_rgba");
    const answer = await api.fetchApi("/upload/image", { method: "POST", body });
    if (!answer.ok) {
      this.toolbar.announce(`ComfyUI did not take ${file.name}: ${answer.status} ${answer.statusText}`);
      return;
    }
    const { name, subfolder } = await answer.json();
    this.choose("coreai_rgba_background", `${subfolder}/${name}`);
  }

  // Pictures.

  /** Show the first of `files`, which `/view` knows by their filename, subfolder and type. */
  open(files) {
    this.files = files;
    this.view.reset();
    return this.go(0);
  }

  async go(index) {
    this.index = (index + this.files.length) % this.files.length;
    const file = this.files[this.index];
    try {
      const picture = await load(file);
      if (file !== this.files[this.index]) return; // another was asked for meanwhile
      this.picture = picture;
      this.message.textContent = "";
    } catch (error) {
      this.picture = undefined;
      this.message.textContent = error.message;
    }
    this.probe = undefined;
    this.describe();
    this.redraw();
  }

  describe() {
    const keys = "Arrow keys read pixels, plus and minus zoom, 0 shows all.";
    const { width, height } = this.picture ?? {};
    const which = this.files.length > 1 ? ` ${this.index + 1} of ${this.files.length}` : "";
    this.stage.ariaLabel = this.picture ? `Picture${which}, ${width} by ${height} pixels. ${keys}` : "No picture";
    this.toolbar.showPictures();
  }

  redraw() {
    const { clientWidth: width, clientHeight: height } = this.stage;
    const dense = window.devicePixelRatio;
    [this.canvas.width, this.canvas.height] = [width * dense, height * dense];
    if (!this.picture || !width || !height) return;
    const context = this.canvas.getContext("2d");
    context.scale(dense, dense);
    const place = this.view.place(this.picture, this.size);
    const split = this.setting("coreai_rgba_split");
    draw(context, this.picture, place, this.mode, { split, background: this.background });
    if (this.probe) outline(context, place, this.probe);
    this.toolbar.showZoom(place.scale);
  }

  get size() {
    return { width: this.stage.clientWidth, height: this.stage.clientHeight };
  }

  // Looking around.

  zoomBy(factor, point) {
    if (!this.picture) return;
    this.view.zoomBy(factor, this.picture, this.size, point);
    this.redraw();
  }

  zoomIn() {
    this.zoomBy(ZOOM_STEP);
  }

  zoomOut() {
    this.zoomBy(1 / ZOOM_STEP);
  }

  showAll() {
    this.view.reset();
    this.redraw();
  }

  /** Where an event is on the stage, in CSS pixels: the canvas of nodes may be zoomed. */
  point(event) {
    const seen = this.stage.getBoundingClientRect();
    const scale = seen.width / this.stage.clientWidth;
    return [(event.clientX - seen.left) / scale, (event.clientY - seen.top) / scale];
  }

  pointAt(event) {
    if (!this.picture) return;
    const point = this.point(event);
    if (this.dragged) {
      this.view.drag(point[0] - this.dragged[0], point[1] - this.dragged[1], this.picture, this.size);
      this.dragged = point;
      this.redraw();
    }
    const [x, y] = this.view.pixelAt(point, this.picture, this.size);
    this.toolbar.showPixel(x, y, this.picture.at(x, y));
  }

  startDrag(event) {
    if (event.button !== 0 || !this.picture) return;
    this.stage.setPointerCapture(event.pointerId);
    this.dragged = this.point(event);
    const end = () => (this.dragged = undefined);
    for (const type of ["pointerup", "pointercancel"]) this.stage.addEventListener(type, end, { once: true });
  }

  /** Only where the viewer was clicked before: else the wheel zooms the canvas of nodes, as everywhere. */
  wheel(event) {
    if (document.activeElement !== this.stage || !this.picture) return;
    event.preventDefault();
    event.stopPropagation();
    this.zoomBy(event.deltaY < 0 ? ZOOM_STEP : 1 / ZOOM_STEP, this.point(event));
  }

  pressed(event) {
    const [zoomIn, zoomOut, showAll] = [() => this.zoomIn(), () => this.zoomOut(), () => this.showAll()];
    const keys = { "+": zoomIn, "=": zoomIn, "-": zoomOut, 0: showAll };
    const act = event.key in ARROWS ? () => this.step(ARROWS[event.key], event.shiftKey ? FAR : 1) : keys[event.key];
    if (!act || !this.picture || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation(); // else ComfyUI moves nodes, or the like
    act();
  }

  /** Read the pixel beside the one read last, the first time that in the middle. */
  step([dx, dy], far) {
    const { width, height } = this.picture;
    const [x, y] = this.probe ?? [Math.floor(width / 2) - dx * far, Math.floor(height / 2) - dy * far];
    this.probe = [clamp(x + dx * far, width), clamp(y + dy * far, height)];
    this.view.show(...this.probe, this.picture);
    this.redraw();
    this.toolbar.showPixel(...this.probe, this.picture.at(...this.probe));
    this.toolbar.announcePixel();
  }
}

async function load(file) {
  const answer = await api.fetchApi(`/view?${new URLSearchParams(file)}`);
  if (!answer.ok) throw new Error("The picture is no longer in ComfyUI's temp folder: run the workflow again");
  return new Picture(await decodePng(await answer.arrayBuffer()));
}

/** `name` is a path in ComfyUI's input folder, with "/" between folders. */
function fileQuery(name) {
  const parts = name.split("/");
  return new URLSearchParams({ filename: parts.pop(), subfolder: parts.join("/"), type: "input" });
}

function clamp(at, length) {
  return Math.min(Math.max(at, 0), length - 1);
}

function outline(context, { x, y, scale }, [column, row]) {
  const side = Math.max(scale, 5); // visible where a pixel is not
  const middle = [x + (column + 0.5) * scale, y + (row + 0.5) * scale];
  for (const [colour, grown] of [["#000", 2], ["#fff", 0]]) {
    context.strokeStyle = colour;
    context.strokeRect(middle[0] - (side + grown) / 2, middle[1] - (side + grown) / 2, side + grown, side + grown);
  }
}
