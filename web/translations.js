/**
 * Our nodes in the user's language, from locales/.
 *
 * ComfyUI's page translates nodes itself, but 1.32.9, that of ComfyUI 0.3.75, forgets what packs bring as soon as it
 * loads a language (Comfy-Org/ComfyUI_frontend, pull request 7214, puts it right), and falls back on what the server
 * says of a node. So that is translated too. Pages without the mistake get the texts that they have already.
 */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const OURS = "CoreAI"; // the ids of all our nodes begin with it
let translations = {};

/** Once, before nodes are registered. */
export async function loadTranslations() {
  translations = await (await api.fetchApi("/i18n")).json();
}

function translationOf(type) {
  const language = app.extensionManager.setting.get("Comfy.Locale");
  return type?.startsWith(OURS) ? translations[language]?.nodeDefs?.[type] : undefined;
}

/** Title, description and tooltips of a kind of node; `definition` is what /object_info says of it. */
export function translateDefinition(definition) {
  const translation = translationOf(definition.name);
  if (!translation) return;
  definition.display_name = translation.display_name;
  definition.description = translation.description;
  definition.output_tooltips = Object.values(translation.outputs).map(({ tooltip }) => tooltip);
  for (const inputs of Object.values(definition.input)) {
    for (const [name, [, options]] of Object.entries(inputs)) options.tooltip = translation.inputs[name].tooltip;
  }
}

/** Names of a new node's inputs. Workflows and prompts keep the names that the server knows. */
export function translateInputs(node) {
  const translation = translationOf(node.comfyClass);
  if (!translation) return;
  const nameOf = (name) => translation.inputs[name]?.name; // none for what other scripts add
  for (const input of node.inputs) input.localized_name = nameOf(input.name) ?? input.localized_name;
  for (const widget of node.widgets) widget.label = nameOf(widget.name) ?? widget.label;
}
