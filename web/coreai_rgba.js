/**
 * What the pack adds to ComfyUI's page: a panel on the sampler node, a viewer on the decode node, and
 * the "Core AI models" panel.
 *
 * ComfyUI loads every script of this folder by itself; this is the one that registers something. It may
 * load it twice, as the folder is served by two names (nodes/comfy_events.py says why).
 */

import { app } from "../../scripts/app.js";
import { restoreOutputs } from "./graph.js";
import { MODELS_COMMAND, addModelsPanel } from "./models_panel.js";
import { addSamplingPanel, followSampling, isSampler } from "./sampling.js";
import { loadTranslations, translateDefinition, translateInputs } from "./translations.js";
import { addViewer, isDecoder } from "./viewer.js";

const extension = {
  name: "coreai_rgba",
  commands: [MODELS_COMMAND],
  menuCommands: [{ path: ["View"], commands: [MODELS_COMMAND.id] }],

  init: loadTranslations,

  beforeRegisterNodeDef(_, definition) {
    translateDefinition(definition);
  },

  async setup() {
    const style = document.createElement("link");
    style.rel = "stylesheet";
    style.href = new URL("coreai_rgba.css", import.meta.url);
    document.head.append(style);
    addModelsPanel();
    await followSampling();
  },

  nodeCreated(node) {
    translateInputs(node);
    if (isSampler(node)) addSamplingPanel(node);
    if (isDecoder(node)) addViewer(node);
  },

  async afterConfigureGraph() {
    await restoreOutputs((node) => isSampler(node) || isDecoder(node));
  },
};

if (!app.extensions.some(({ name }) => name === extension.name)) app.registerExtension(extension);
