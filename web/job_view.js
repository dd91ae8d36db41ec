/** How a download or a compile stands: a bar, a line, and a button to cancel it. */

import { size } from "./sampling.js";
import { element } from "./viewer_controls.js";

const NOUNS = { download: "Download", compile: "Compile" };

export class JobView {
  constructor(cancel) {
    this.title = element("b");
    this.button = element("button", { type: "button", textContent: "Cancel", onclick: cancel });
    this.bar = element("progress", { max: 1 });
    this.amount = element("span", { className: "coreai-rgba-amount" });
    this.text = element("p");
    // Read out when it changes, so it says the phase alone until there is an end to tell.
    this.phase = element("p", { className: "coreai-rgba-unseen", role: "status" });
    this.body = element("div", { className: "coreai-rgba-job", role: "group", hidden: true });
    const row = (...children) => element("div", { className: "coreai-rgba-row" }, ...children);
    this.progress = row(this.bar, this.amount);
    this.body.append(row(this.title, this.button), this.progress, this.text);
    this.element = element("div", { className: "coreai-rgba-jobs" }, this.body, this.phase);
  }

  /** `state` is the JobState of host/jobs.py, or null. */
  show(state) {
    this.running = state?.outcome === "running" || state?.outcome === "stopping";
    this.body.hidden = !state;
    if (!state) return;
    const { task, name, outcome, text, done, total } = state;
    const title = `${NOUNS[task]} of ${name}`;
    this.body.ariaLabel = this.title.textContent = title;
    this.body.dataset.outcome = outcome;
    this.bar.ariaLabel = `${title}, ready so far`;
    this.progress.hidden = this.button.hidden = !this.running;
    this.button.disabled = outcome === "stopping";
    this.button.ariaLabel = `Cancel the ${task} of ${name}`;
    if (done) this.bar.value = done / total;
    else this.bar.removeAttribute("value"); // nobody knows yet how far it is
    this.amount.textContent = total ? amount(task, done, total) : "";
    this.text.textContent = this.running ? text : `${outcome}: ${text}`;
    const phase = this.running ? `${title} is ${outcome}` : `${title} ${outcome}: ${text}`;
    if (this.phase.textContent !== phase) this.phase.textContent = phase;
  }
}

function amount(task, done, total) {
  return task === "download" ? `${size(done)} of ${size(total)}` : `${done} of ${total} bundles`;
}
