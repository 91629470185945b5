// The list of conversations beside the chat; on narrow windows it opens over it.

import { byId, element, iconButton } from "./common.js";
import { asMarkdown } from "./conversation.js";
import * as store from "./store.js";

const DAY = 24 * 3600 * 1000;

/** Lists conversations. `chosen(id)` opens one, `fresh()` begins one, `gone(id)`: it was deleted. */
export class Sidebar {
  constructor({ chosen, fresh, gone }) {
    this._chosen = chosen;
    this._gone = gone;
    this._root = byId("sidebar");
    this._list = element("nav", { "aria-label": "Conversations" });
    this._menu = byId("open-sidebar");
    this._foot = element("div", { class: "foot" },
      element("button", { type: "button", class: "text-button", onclick: () => this._export() }, "Export all"),
      element("button", { type: "button", class: "text-button", onclick: () => this._removeAll() }, "Delete all"));
    this._root.replaceChildren(
      element("div", { class: "head" },
        element("button", { type: "button", class: "button", id: "fresh", onclick: () => { this.close(); fresh(); } }, "New chat"),
        iconButton("close", "Close the list", () => this.close(true), { id: "close-sidebar" })),
      this._list, this._foot);
    this._menu.onclick = () => this._open();
    byId("veil").onclick = () => this.close(true);
    this._root.onkeydown = (event) => event.key === "Escape" && this.close(true);
  }

  /** List all conversations, and mark the current one. */
  async refresh(current) {
    const [all, kept] = [await store.titles(), await store.isKept()];
    const now = Date.now();
    const groups = [
      ["Today", all.filter((one) => now - one.updated < DAY)],
      ["Earlier", all.filter((one) => now - one.updated >= DAY)],
    ].filter(([, some]) => some.length);
    this._list.replaceChildren(
      !kept && element("p", { class: "note" }, "This browser keeps no history: it is gone with the page.") || "",
      ...groups.flatMap(([title, some]) => [
        element("h2", {}, title),
        element("ul", {}, ...some.map((one) => this._entry(one, one.id === current)))]),
      all.length ? "" : element("p", { class: "note" }, "Your chats will be here, in this browser alone."));
    this._foot.hidden = !all.length;
  }

  close(focus = false) {
    const wasOpen = document.body.classList.contains("with-sidebar");
    document.body.classList.remove("with-sidebar");
    this._menu.setAttribute("aria-expanded", "false");
    if (wasOpen && focus) this._menu.focus();
  }

  _open() {
    document.body.classList.add("with-sidebar");
    this._menu.setAttribute("aria-expanded", "true");
    byId("fresh").focus();
  }

  _entry(conversation, isCurrent) {
    const title = conversation.title || "Untitled";
    const open = element("button", { type: "button", class: "title", title, onclick: () => { this.close(); this._chosen(conversation.id); } }, title);
    if (isCurrent) open.setAttribute("aria-current", "true");
    const remove = iconButton("trash", `Delete “${title}”`, () => this._remove(conversation, title));
    return element("li", {}, open, remove);
  }

  async _export() {
    download("kiln-chats.json", JSON.stringify(await store.all(), null, 2), "application/json");
  }

  async _remove(conversation, title) {
    if (!(await confirmed(`Delete “${title}”?`, "Delete"))) return;
    await store.remove(conversation.id);
    this._gone(conversation.id);
  }

  async _removeAll() {
    if (!(await confirmed("Delete all chats?", "Delete all"))) return;
    await store.removeAll();
    this._gone(null);
  }
}

/** Ask whether to delete something. */
function confirmed(question, verb) {
  const dialog = element("dialog", { "aria-labelledby": "confirm-title" },
    element("form", { method: "dialog" },
      element("h2", { id: "confirm-title" }, question),
      element("p", {}, "It is kept in this browser alone, and cannot be brought back."),
      element("menu", {},
        element("button", { value: "" }, "Cancel"),
        element("button", { value: "yes", class: "main" }, verb))));
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    };
  });
}

/** Save a conversation as a Markdown file. */
export function saveAsMarkdown(conversation) {
  const name = (conversation.title || "chat").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
  download(`${name}.md`, asMarkdown(conversation), "text/markdown");
}

function download(name, text, type) {
  const href = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60000);
}
