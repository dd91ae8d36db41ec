/** The sampler node's panel: which step it is at, how long it takes, and what is in memory. */

import { api } from "../../scripts/api.js";
import { addPanel, allNodes, nodeAt, onOutput } from "./graph.js";

const NODE = "CoreAIDiTSampler";
const HEIGHT = 58;

/** The panels by node: one that is gone is forgotten with it. */
const panels = new WeakMap();
let bundles = [];

export function isSampler(node) {
  return node.comfyClass === NODE;
}

export function addSamplingPanel(node) {
  const panel = new SamplingPanel();
  panels.set(node, panel);
  addPanel(node, "sampling", panel.element, { height: HEIGHT, grows: false });
  onOutput(node, (state) => panel.show(state, "finished"));
}

/** Once, at start. */
export async function followSampling() {
  api.addEventListener("coreai_rgba.sampling", ({ detail }) => {
    panelOf(detail.node)?.show(detail, "running");
  });
  for (const type of ["execution_interrupted", "execution_error"]) {
    api.addEventListener(type, () => allPanels().forEach((panel) => panel.stop()));
  }
  api.addEventListener("coreai_rgba.memory", ({ detail }) => showMemory(detail));
  showMemory(await (await api.fetchApi("/coreai_rgba/memory")).json());
}

function panelOf(executionId) {
  const node = nodeAt(executionId);
  return node && panels.get(node);
}

function allPanels() {
  return [...allNodes()].map(([, node]) => panels.get(node)).filter(Boolean);
}

function showMemory(memory) {
  bundles = memory.bundles;
  allPanels().forEach((panel) => panel.showMemory());
}

class SamplingPanel {
  constructor() {
    this.element = document.createElement("div");
    this.element.className = "coreai-rgba-sampling";
    this.element.role = "group";
    this.element.ariaLabel = "Sampling";
    this.bar = document.createElement("progress");
    this.bar.ariaLabel = "Steps done";
    this.steps = line("coreai-rgba-steps");
    this.time = line("coreai-rgba-time");
    this.memory = line("coreai-rgba-memory");
    // Read out when it changes, which is why it says the phase only: numbers at each step would never let up.
    this.phase = line("coreai-rgba-unseen");
    this.phase.role = "status";
    const row = document.createElement("div");
    row.className = "coreai-rgba-row";
    row.append(this.steps, this.time);
    this.element.append(this.bar, row, this.memory, this.phase);
    this.state = { step: 0, total: 0 };
    this.steps.textContent = "Not run yet";
    this.showProgress();
    this.showMemory();
  }

  /** `state` is what nodes/comfy_events.py sends; `phase` is "running" or "finished". */
  show(state, phase) {
    this.state = state;
    this.running = phase === "running";
    const { step, total, seconds, seconds_per_step: each } = state;
    if (phase === "finished") {
      this.say(`${total} ${total === 1 ? "step" : "steps"} in ${duration(seconds)}`, "Sampling finished");
    } else if (step) {
      this.say(`Step ${step} of ${total}`, "Sampling");
    } else {
      this.say("Loading the model", "Loading the model");
    }
    const left = this.running && step < total ? `, ${duration(each * (total - step))} left` : "";
    this.time.textContent = each ? `${duration(each)} a step${left}` : "";
    this.showProgress();
  }

  /** The run ended before the sampler did. */
  stop() {
    if (!this.running) return;
    this.running = false;
    this.say(`Stopped after step ${this.state.step} of ${this.state.total}`, "Sampling stopped");
    this.time.textContent = "";
  }

  say(text, phase) {
    this.steps.textContent = text;
    if (this.phase.textContent !== phase) this.phase.textContent = phase;
  }

  showProgress() {
    this.bar.max = Math.max(this.state.total, 1);
    this.bar.value = this.state.step;
  }

  showMemory() {
    const total = bundles.reduce((sum, bundle) => sum + bundle.bytes, 0);
    const names = bundles.map((bundle) => `${bundle.kind} ${size(bundle.bytes)}`).join(", ");
    this.memory.textContent = bundles.length ? `In memory: ${size(total)} (${names})` : "In memory: no model";
    this.memory.title = bundles.map((bundle) => bundle.name).join("\n");
  }
}

function line(className) {
  const element = document.createElement("div");
  element.className = className;
  return element;
}

/** As people read it: 0.17 s, 12 s, 3 min 5 s, 2 h 10 min. */
function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** As people read it: 27.3 GB, 16 MB. */
export function size(bytes) {
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : `${Math.max(1, Math.round(bytes / 1e6))} MB`;
}
