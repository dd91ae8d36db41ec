/**
 * Nodes of the open workflow, subgraphs included, and what they showed last.
 *
 * ComfyUI numbers a node in a subgraph by the way to it: "5:3" is node 3 in the subgraph that node 5 is.
 */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const UI_KEY = "coreai_rgba"; // of nodes/comfy_events.py
const RUNS_TO_LOOK_AT = 32;
const MARGIN = 6;
const NO_ID = "00000000-0000-0000-0000-000000000000";

function rootGraph() {
  return app.rootGraph ?? app.graph;
}

/** Each node as [execution id, node]. */
export function* allNodes(graph = rootGraph(), path = "") {
  for (const node of graph.nodes) {
    yield [`${path}${node.id}`, node];
    if (node.subgraph) yield* allNodes(node.subgraph, `${path}${node.id}:`);
  }
}

/** The node with an execution id; undefined if the open workflow has none. */
export function nodeAt(executionId) {
  for (const [id, node] of allNodes()) if (id === String(executionId)) return node;
}

/**
 * Add `element` to a node as a widget that no workflow stores a value of and no prompt sends. `height` is in
 * canvas units; one that `grows` takes what room the node has.
 */
export function addPanel(node, name, element, { height, grows }) {
  element.classList.add("coreai-rgba");
  element.style.minHeight = `${height}px`;
  if (grows) element.classList.add("widget-expands"); // Nodes 2.0 asks for it by this class
  else element.style.maxHeight = `${height}px`;
  const whole = () => height + 2 * MARGIN;
  const limits = { getMinHeight: whole, getMaxHeight: grows ? undefined : whole };
  const options = { serialize: false, hideOnZoom: false, hideInPanel: true, margin: MARGIN, ...limits };
  const widget = node.addDOMWidget(name, "coreai_rgba", element, options);
  widget.serialize = false; // the option is for prompts, this is for workflows
  for (const type of ["pointerdown", "dblclick"]) element.addEventListener(type, leaveNodeAlone);
  element.addEventListener("wheel", zoomCanvas);
  return widget;
}

/** Else Nodes 2.0 would drag the node. */
function leaveNodeAlone(event) {
  if (event.button === 0) event.stopPropagation();
}

/** Over a panel the wheel zooms the canvas as anywhere else. Nodes 2.0 sees to that itself. */
function zoomCanvas(event) {
  if (!event.currentTarget.closest("[data-node-id]")) app.canvas.processMouseWheel(event);
}

/** Have the open workflow take note of what `change` does, so that it can be undone and is kept. */
export function asChange(change) {
  app.canvas.emitBeforeChange();
  change();
  app.canvas.emitAfterChange();
}

/** Call `show(output)` with what a node tells after each run. */
export function onOutput(node, show) {
  const before = node.onExecuted;
  node.onExecuted = function (output) {
    before?.apply(this, arguments);
    const [ours] = output?.[UI_KEY] ?? [];
    if (ours) show(ours);
  };
}

/** After a workflow was opened: let those of its nodes that `concerns` names show what they showed last. */
export async function restoreOutputs(concerns) {
  const graph = rootGraph();
  const nodes = [...allNodes(graph)].filter(([, node]) => concerns(node));
  if (!nodes.length) return;
  const answer = await api.fetchApi(`/history?max_items=${RUNS_TO_LOOK_AT}`);
  const runs = Object.values(await answer.json()).filter((run) => isRunOf(graph, run));
  for (const [id, node] of nodes) {
    const last = runs.findLast((run) => run.outputs[id]?.[UI_KEY] && run.prompt[2][id]?.class_type === node.type);
    if (last) node.onExecuted(last.outputs[id]);
  }
}

/**
 * By the workflow's id. Those that came from an API file have none of their own, or get one only when the page is
 * opened again, and are told apart by their nodes.
 */
function isRunOf(graph, run) {
  const workflow = run.prompt[3].extra_pnginfo?.workflow;
  if (workflow?.id !== NO_ID) return workflow?.id === graph.id;
  const names = (nodes) => nodes.map(({ id, type }) => `${id} ${type}`).sort().join();
  return names(workflow.nodes) === names(graph.nodes);
}
