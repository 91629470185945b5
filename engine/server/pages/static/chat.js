// The chat: what is shown, what the user does, and the answer that runs.

import { byId, element, icon, iconButton, showHeader } from "./common.js";
import { add, messagesOf, newConversation, path, show, versions } from "./conversation.js";
import { ModelPicker } from "./models.js";
import { Settings } from "./settings.js";
import { Sidebar, saveAsMarkdown } from "./sidebar.js";
import * as store from "./store.js";
import { ask, newReply } from "./stream.js";
import { Answer, Question } from "./turn.js";
import { Viewport } from "./viewport.js";

const IDEAS = ["What is 17 + 25?", 'Reverse the word "kiln".', "Sort these numbers: 9, 2, 7, 4", "Who are you?"];
const NO_CHAT = "This server computes embeddings: there is nothing to chat with. Programs use /v1/embeddings.";
const RETRY_MS = 3000; // until the list of models is read again
const KEEP_MS = 5000; // between two copies of an answer that grows

class Chat {
  constructor() {
    this._talk = newConversation();
    this._running = null; // the AbortController of the answer that grows
    this._deleted = new WeakSet(); // conversations
    this._settings = new Settings();
    this._server = null; // its state, as of the header
    const look = () => this._server && this._showState(this._server);
    this._models = new ModelPicker((card) => this._settings.showDefaults(card), look);
    this._view = new Viewport(byId("scroll"), byId("to-end"));
    this._sidebar = new Sidebar({
      chosen: (id) => this.open(id), fresh: () => this.fresh(), gone: (id) => this._gone(id),
    });
    this._listen();
    this.open(location.hash.slice(1));
    showHeader("chat", (state) => this._showState(state));
  }

  /** Show a conversation of the history, or an empty one. */
  async open(id) {
    this.stop();
    this._talk = (id && (await store.get(id))) || newConversation();
    this._show();
  }

  fresh() {
    this.open(null);
    byId("input").focus();
  }

  /** End the answer that runs; what has arrived stays. */
  stop() {
    this._running?.abort();
    this._running = null;
  }

  /** Ask `text` behind the message `parent`, by default the last one. */
  send(text, parent = this._talk.leaf) {
    add(this._talk, parent, { role: "user", content: text });
    this._answer();
  }

  /** Get an answer to what the conversation ends with. */
  async _answer() {
    this.stop();
    const talk = this._talk;
    const body = { ...this._settings.body(), messages: messagesOf(talk, this._settings.system) };
    if (this._models.chosen) body.model = this._models.chosen;
    const node = add(talk, talk.leaf, { ...newReply(), model: body.model ?? null });
    const running = this._running = new AbortController();
    this._show();
    this._view.toEnd();
    const turn = this._turns.at(-1);
    await this._keep(talk);
    const keeping = setInterval(() => this._keep(talk), KEEP_MS);
    try {
      await ask(body, node, running.signal, () => this._view.paint(() => turn.update(true)));
    } catch (error) {
      if (error.name === "AbortError") node.stopped = true;
      else node.error = error instanceof TypeError ? "The server does not answer." : error.message;
    }
    clearInterval(keeping);
    if (node.reasoning) node.reasoningMs ??= node.ms - node.firstMs;
    this._view.cancel();
    await this._keep(talk);
    if (this._running === running) this._running = null;
    if (this._talk !== talk) return;
    turn.update(false);
    this._view.follow();
    this._showButton();
    byId("say").textContent = node.error ?? (node.content.slice(0, 1000) || "The answer has ended");
  }

  async _keep(talk) {
    if (this._deleted.has(talk)) return; // its answer ended after that
    try {
      await store.save(talk);
    } catch (error) {
      byId("state").textContent = `The history cannot be kept: ${error.message}.`;
      return;
    }
    if (this._talk === talk) history.replaceState(null, "", `#${talk.id}`);
    this._sidebar.refresh(this._talk.id);
  }

  /** Show the whole conversation anew. */
  _show() {
    const nodes = path(this._talk);
    const results = new Map(nodes.filter((one) => one.role === "tool").map((one) => [one.callId, one.content]));
    this._turns = nodes.filter((one) => one.role !== "tool").map((node) => this._turn(node, results));
    const shown = this._turns.length ? this._turns.map((turn) => turn.root) : [welcome((idea) => this._offer(idea))];
    byId("talk").replaceChildren(...shown);
    document.title = `${this._talk.title || "Chat"} · Kiln`;
    byId("save").hidden = !nodes.length;
    history.replaceState(null, "", nodes.length ? `#${this._talk.id}` : location.pathname);
    this._sidebar.refresh(this._talk.id);
    this._showButton();
    this._view.toEnd();
  }

  _turn(node, results) {
    const shared = { versions: this._versions(node) };
    if (node.role === "user") {
      return new Question(node, { ...shared, edit: (text) => this.send(text, node.parent) });
    }
    const isLast = node.id === this._talk.leaf;
    return new Answer(node, {
      ...shared, results,
      running: isLast && this._running !== null,
      wantsTokens: isLast && this._running !== null && this._settings.wantsLogprobs,
      respond: isLast && ((found) => this._respond(found)),
      retry: () => {
        this._talk.leaf = node.parent;
        this._answer();
      },
    });
  }

  /** Return what goes between the versions of a message; null if there is one. */
  _versions(node) {
    const all = versions(this._talk, node);
    if (all.length < 2) return null;
    const at = all.indexOf(node);
    const step = (name, by, sign) => element("button", {
      type: "button", class: "text-button", "aria-label": name, disabled: !all[at + by],
      onclick: () => {
        this.stop();
        show(this._talk, all[at + by]);
        this._keep(this._talk);
        this._show();
      },
    }, sign);
    return element("span", { class: "versions" },
      step("Version before", -1, "‹"), `${at + 1}/${all.length}`, step("Next version", 1, "›"));
  }

  /** Answer the calls of the last message by hand. */
  _respond(found) {
    for (const { callId, content } of found) add(this._talk, this._talk.leaf, { role: "tool", callId, content });
    this._answer();
  }

  _gone(id) {
    if (id === null || id === this._talk.id) {
      this._deleted.add(this._talk);
      this.fresh();
    } else this._sidebar.refresh(this._talk.id);
  }

  /** Another tab has changed a conversation: read it again, unless an answer grows here. */
  async _changedElsewhere(id) {
    const newer = id === this._talk.id ? await store.get(id) : null;
    if (newer && !this._running && newer.id === this._talk.id && newer.revision > this._talk.revision) {
      this._talk = newer;
      this._show();
    } else this._sidebar.refresh(this._talk.id);
  }

  /** Show whether the server takes requests. It goes on by itself as soon as it does. */
  async _showState(server) {
    this._server = server;
    const { state, message } = server;
    const wrong = state === "ready" ? await this._whyNot() : `${capital(message)}. This page goes on by itself.`;
    if (server !== this._server) return; // it has changed meanwhile
    byId("state").textContent = wrong ?? "";
    document.body.classList.toggle("no-chat", !this._models.canChat);
    this._isReady = wrong === null;
    this._showButton();
  }

  /** Return why a server that is ready cannot chat; null if it can. */
  async _whyNot() {
    try {
      await this._models.load();
    } catch (error) {
      setTimeout(() => this._showState(this._server), RETRY_MS);
      return `The models cannot be read: ${error.message}.`;
    }
    return this._models.canChat ? null : NO_CHAT;
  }

  _showButton() {
    const button = byId("send");
    const running = this._running !== null;
    button.replaceChildren(icon(running ? "stop" : "send"));
    button.setAttribute("aria-label", running ? "Stop" : "Send");
    button.title = running ? "Stop (Esc)" : "Send (Enter)";
    button.disabled = !running && (!this._isReady || !byId("input").value.trim());
  }

  _submit() {
    const input = byId("input");
    if (this._running) this.stop();
    else if (this._isReady && input.value.trim()) {
      const text = input.value;
      input.value = "";
      this._fit();
      this.send(text);
    }
  }

  /** Put an idea into the field, and send it if the server is ready. */
  _offer(idea) {
    byId("input").value = idea;
    this._fit();
    this._submit();
  }

  _fit() {
    const input = byId("input");
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight}px`;
    this._showButton();
  }

  _listen() {
    byId("form").onsubmit = (event) => {
      event.preventDefault();
      this._submit();
    };
    byId("input").oninput = () => this._fit();
    byId("input").onkeydown = (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this._running) this._submit();
    };
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.stop();
    });
    byId("tools").replaceChildren(
      iconButton("save", "Save as Markdown", () => saveAsMarkdown(this._talk), { id: "save" }),
      iconButton("plus", "New chat", () => this.fresh(), { id: "fresh-small" }),
      iconButton("tune", "Settings", () => this._settings.open(), { id: "open-settings" }));
    byId("open-sidebar").append(icon("menu"));
    byId("to-end").append(icon("down"));
    store.whenChanged((id) => this._changedElsewhere(id));
    window.addEventListener("hashchange", () => this.open(location.hash.slice(1)));
  }
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function welcome(ask) {
  return element("div", { id: "welcome" }, icon("flame"), element("h1", {}, "Say something"),
    element("p", {}, "This page talks to the model through the same API as your programs."),
    element("div", { class: "ideas" }, ...IDEAS.map((idea) =>
      element("button", { type: "button", class: "button", onclick: () => ask(idea) }, idea))));
}

new Chat();
