/** The "Core AI models" panel: the model sets and their state, and downloading and compiling them. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { JobView } from "./job_view.js";
import { acceptLicence } from "./licence_dialog.js";
import { size } from "./sampling.js";
import { element } from "./viewer_controls.js";

const TAB = "coreai-rgba-models";
const TITLE = "Core AI models";
const SECONDS_SHOWN = 10;

/** For the menu and for keyboard users, who may give it a key. */
export const MODELS_COMMAND = {
  id: "coreai_rgba.models",
  label: TITLE,
  icon: "pi pi-box",
  async function() {
    await app.extensionManager.command.execute(`Workspace.ToggleSidebarTab.${TAB}`);
    setTimeout(() => panel.element.focus()); // when ComfyUI has drawn it
  },
};

/** Once, at start. */
export function addModelsPanel() {
  app.extensionManager.registerSidebarTab({
    id: TAB,
    icon: MODELS_COMMAND.icon,
    title: TITLE,
    tooltip: "Core AI models: what is there, download, compile",
    type: "custom",
    render: (place) => panel.open(place),
  });
  api.addEventListener("coreai_rgba.models", ({ detail }) => panel.follow(detail));
  api.addEventListener("reconnected", () => panel.element.isConnected && panel.refresh());
}

class ModelsPanel {
  constructor() {
    this.turn = 0;
    this.alert = element("p", { className: "coreai-rgba-alert", role: "alert" });
    this.job = new JobView(() => this.act(() => ask("cancel", {})));
    this.sets = element("div", { className: "coreai-rgba-sets" });
    const again = element("button", { type: "button", textContent: "Look again", onclick: () => this.refresh() });
    const header = element("header", { className: "coreai-rgba-row" }, element("h2", { textContent: TITLE }), again);
    this.element = element("section", { className: "coreai-rgba coreai-rgba-models", tabIndex: -1 });
    this.element.ariaLabel = TITLE;
    this.element.append(header, this.alert, this.job.element, this.sets);
  }

  /** ComfyUI calls this whenever it draws the place anew. */
  open(place) {
    if (this.element.parentNode === place) return;
    place.replaceChildren(this.element);
    this.refresh();
  }

  refresh() {
    return this.act(async () => {
      const turn = ++this.turn;
      const { names, published, job } = await ask("models");
      const cards = names.map((name) => new Card(name, this, published));
      const offers = names.includes(published.name) ? [] : [publishedCard(published, this)];
      this.sets.replaceChildren(...offers, ...cards.map((card) => card.element));
      this.show(job);
      for (const card of cards) {
        if (turn !== this.turn) return; // somebody looks again
        card.show(await ask(`model?name=${encodeURIComponent(card.name)}`));
        this.show(this.state);
      }
    });
  }

  download({ name, folder, licence: notice }) {
    return this.act(async () => {
      const offer = await ask(`licence?name=${encodeURIComponent(name)}`);
      if (!(await acceptLicence({ name, folder, notice, ...offer }))) return;
      await ask("download", { name, accept_license: true, token: offer.token });
    });
  }

  compile(name) {
    return this.act(() => ask("compile", { name }));
  }

  /** What goes wrong in `action` is shown. */
  async act(action) {
    this.alert.textContent = "";
    try {
      await action();
    } catch (error) {
      this.alert.textContent = error.message;
    }
  }

  /** A job has gone on or ended. `state` is the JobState of host/jobs.py. */
  follow(state) {
    this.show(state);
    if (state.outcome === "running" || state.outcome === "stopping") return;
    if (state.task === "download" && state.outcome === "done") {
      app.extensionManager.command.execute("Comfy.RefreshNodeDefinitions"); // the nodes' menus list the new set
    }
    if (this.element.isConnected) this.refresh();
    else announceEnd(state);
  }

  /** `state` is null if there was no job yet. Only one can run at a time. */
  show(state) {
    this.state = state;
    this.job.show(state);
    for (const button of this.sets.querySelectorAll("button")) button.disabled = this.job.running;
  }
}

function announceEnd({ task, name, outcome, text }) {
  const severity = { done: "success", failed: "error", cancelled: "info" }[outcome];
  const summary = `${task === "download" ? "Download" : "Compile"} of ${name}: ${outcome}`;
  app.extensionManager.toast.add({ severity, summary, detail: text, life: 1000 * SECONDS_SHOWN });
}

/** A model set that is there: its name at once, all else when it is known. */
class Card {
  constructor(name, panel, published) {
    Object.assign(this, { name, panel, published });
    this.state = element("span", { className: "coreai-rgba-state", textContent: "looking…" });
    this.actions = element("div", { className: "coreai-rgba-row coreai-rgba-actions" });
    this.body = element("div");
    this.element = cardOf(name, this.state, this.actions, this.body);
  }

  /** `model` is the Description of host/describe.py, with its lines. */
  show(model) {
    const bytes = model.parts.reduce((sum, part) => sum + part.size + (part.compiled?.size ?? 0), 0);
    this.state.textContent = `${model.usable ? "ready" : "not ready"}, ${size(bytes)}`;
    const bundles = model.lines.splice(model.licence ? 1 : 0, model.parts.length); // they follow the licence
    const summary = element("summary", { textContent: `Bundles: ${bundles.length}` });
    this.body.replaceChildren(list(model.lines), element("details", {}, summary, list(bundles)));
    this.actions.replaceChildren();
    const { name, panel, published } = this;
    const incomplete = model.problems.some((problem) => problem.command.startsWith("coreai-rgba download"));
    if (name === published.name && incomplete) {
      this.actions.append(act("Download what is missing…", name, () => panel.download(published)));
    }
    if (model.parts.some((part) => part.compiled?.needed)) {
      this.actions.append(act("Compile for this Mac", name, () => panel.compile(name)));
    }
  }
}

/** The published model set while it is not there. */
function publishedCard(published, panel) {
  const { name, repository, licence, folder, begun } = published;
  const state = element("span", { className: "coreai-rgba-state" });
  state.textContent = begun ? "begun to download" : "not downloaded";
  const lines = [`licence: ${licence}`, `published as: ${repository}`, `goes to: ${folder}`];
  const actions = element("div", { className: "coreai-rgba-row" });
  actions.append(act(begun ? "Go on with the download…" : "Download…", name, () => panel.download(published)));
  return cardOf(name, state, actions, list(lines));
}

function cardOf(name, state, actions, body) {
  const header = element("div", { className: "coreai-rgba-row" }, element("h3", { textContent: name }), state);
  return element("article", { className: "coreai-rgba-card", ariaLabel: name }, header, actions, body);
}

/** Lines of the form "kind: text", as the command line has them; problems stand out. */
function list(lines) {
  const items = lines.map((text) => {
    const [kind, ...rest] = text.split(": ");
    const className = kind === "problem" ? "coreai-rgba-problem" : "";
    return element("li", { className }, element("b", { textContent: `${kind}: ` }), rest.join(": "));
  });
  return element("ul", {}, ...items);
}

function act(text, name, onclick) {
  return element("button", { type: "button", textContent: text, ariaLabel: `${text} ${name}`, onclick });
}

/** What a route of nodes/comfy_routes.py answers; with a `body` it is asked to do something. Throws its `error`. */
async function ask(route, body) {
  const post = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const answer = await api.fetchApi(`/coreai_rgba/${route}`, body && post);
  if (answer.ok) return answer.json();
  const { error } = await answer.json().catch(() => ({ error: `the server answers ${answer.status}` }));
  throw new Error(error);
}

const panel = new ModelsPanel();
