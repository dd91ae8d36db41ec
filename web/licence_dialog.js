/** The licence of a model set, to be read and accepted before anything of it is downloaded. */

import { size } from "./sampling.js";
import { element } from "./viewer_controls.js";

/** Whether the user accepts. `address` is the page of the repository, `size` the bytes that come into `folder`. */
export function acceptLicence({ name, licence, notice, address, size: bytes, folder }) {
  const dialog = element("dialog", { className: "coreai-rgba coreai-rgba-licence", ariaLabel: `Licence of ${name}` });
  const text = element("pre", { textContent: licence, tabIndex: 0, role: "region", ariaLabel: "Text of the licence" });
  const page = element("a", { href: address, textContent: address, target: "_blank", rel: "noreferrer" });
  const amount = element("p", { textContent: `${size(bytes)} will be downloaded to ${folder}.` });
  const box = element("input", { type: "checkbox", onchange: () => (go.disabled = !box.checked) });
  const accept = element("label", {}, box, " I have read the licence and accept it");
  const cancel = element("button", { type: "button", textContent: "Cancel", onclick: () => dialog.close() });
  const go = element("button", { type: "button", textContent: "Download", disabled: true });
  go.onclick = () => dialog.close("accepted");
  const buttons = element("div", { className: "coreai-rgba-row" }, cancel, go);
  dialog.append(element("h2", { textContent: `Licence of ${name}` }), element("p", { textContent: notice }), page);
  dialog.append(text, amount, accept, buttons);
  dialog.addEventListener("keydown", (event) => event.stopPropagation()); // ComfyUI's keys are not meant here
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      dialog.remove();
      resolve(dialog.returnValue === "accepted");
    };
  });
}
