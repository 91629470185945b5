// The API key: where it is kept, and the dialog that asks for it.
//
// It is kept for the tab (sessionStorage), so that it is gone when the tab is closed: a key on a
// shared computer is a secret left behind. Who ticks "Remember" keeps it in the browser
// (localStorage), and other tabs then have it too.

import { element } from "./dom.js";

const NAME = "kiln.key";
let asking = null; // the promise of the dialog that is open
let dismissed = false; // the user closed the dialog without a key

/** Return the key; null if there is none. */
export function currentKey() {
  return sessionStorage.getItem(NAME) ?? localStorage.getItem(NAME);
}

function keep(key, remember) {
  sessionStorage.removeItem(NAME);
  localStorage.removeItem(NAME);
  if (key) (remember ? localStorage : sessionStorage).setItem(NAME, key);
  window.dispatchEvent(new Event("kiln-key"));
}

/** Forget the key, here and in what other tabs remember. */
function forgetKey() {
  keep(null, false);
}

/** Whether a call may open the dialog: after the user closed it, only what the user does may. */
export function mayAsk(byUser) {
  return byUser || !dismissed;
}

/** Ask for a key. Returns whether one was entered. Calls at the same time share one dialog. */
export function askForKey() {
  const refused = currentKey() !== null;
  return ask(refused ? "The server refuses the key that this page has." : "This server wants its API key.");
}

/** Let the user enter another key, or forget this one. */
export function changeKey() {
  return ask("This page sends a key with each request. Enter another one, or forget it.");
}

function ask(says) {
  asking ??= showDialog(says).then((entered) => {
    asking = null;
    dismissed = !entered;
    return entered;
  });
  return asking;
}

function showDialog(says) {
  const input = element("input", {
    type: "password", required: true, autocomplete: "current-password", spellcheck: false,
  });
  const remember = element("input", { type: "checkbox", checked: localStorage.getItem(NAME) !== null });
  const cancel = element("button", { type: "button" }, "Cancel");
  const forget = element("button", { type: "button", hidden: currentKey() === null }, "Forget");
  const form = element("form", { method: "dialog" },
    element("h2", { id: "key-title" }, "API key"),
    element("p", {}, says),
    element("label", {}, "Key", input),
    element("label", { class: "check" }, remember, "Remember it in this browser"),
    element("menu", {}, forget, cancel, element("button", { class: "main" }, "Use key")));
  const dialog = element("dialog", { id: "key-dialog", "aria-labelledby": "key-title" }, form);
  document.body.append(dialog);
  cancel.onclick = () => dialog.close();
  forget.onclick = () => {
    forgetKey();
    dialog.close();
  };
  return new Promise((resolve) => {
    let entered = false;
    form.onsubmit = () => {
      keep(input.value.trim(), remember.checked);
      entered = true;
    };
    dialog.onclose = () => {
      dialog.remove();
      resolve(entered);
    };
    dialog.showModal();
    input.focus();
  });
}
