// Copying text, also where the browser has no clipboard: on a plain http:// address.

import { element, icon, iconButton } from "./dom.js";

/** Copy a text. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = element("textarea", { class: "unseen", value: text });
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

/** Return a button that copies what `text()` returns, and shows for a moment that it did. */
export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    await copy(text());
    button.replaceChildren(icon("done"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}
