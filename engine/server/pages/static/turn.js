// One message of the conversation as elements: a question, or an answer that may still grow.

import { copyButton } from "./clipboard.js";
import { element, icon, iconButton } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { TokensView } from "./tokens.js";

/** Shows a question. `actions`: edit(text), and the `versions` of it. */
export class Question {
  constructor(node, actions) {
    this._node = node;
    this._actions = actions;
    this.root = element("article", { class: "turn user", "aria-label": "You" });
    this._rest();
  }

  update() {}

  _rest() {
    this.root.replaceChildren(
      element("div", { class: "bubble" }, this._node.content),
      element("div", { class: "actions" }, this._actions.versions,
        copyButton(() => this._node.content, "Copy the message"),
        iconButton("edit", "Edit the message", () => this._edit())));
  }

  _edit() {
    const field = element("textarea", { value: this._node.content, rows: 3, "aria-label": "Edited message" });
    const send = element("button", { class: "button main" }, "Send");
    const form = element("form", { class: "edit" }, field,
      element("div", { class: "row" },
        element("button", { type: "button", class: "button", onclick: () => this._rest() }, "Cancel"), send));
    form.onsubmit = (event) => {
      event.preventDefault();
      if (field.value.trim()) this._actions.edit(field.value);
    };
    field.onkeydown = (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        this._rest();
      }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    };
    this.root.replaceChildren(form);
    field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight / 2)}px`;
    field.focus();
  }
}

/** Shows an answer. `actions`: retry(), `versions`, `results` of its calls by id, respond(results). */
export class Answer {
  constructor(node, actions) {
    this._node = node;
    this._actions = actions;
    this._asTokens = node.logprobs.length > 0 || actions.wantsTokens;
    this._thought = null;
    this._text = new MarkdownView();
    this._tokens = new TokensView();
    this._body = element("div", { class: "body" });
    this._end = element("div", { class: "end" });
    this.root = element("article", { class: "turn assistant", "aria-label": "Answer" },
      icon("flame"), element("div", { class: "column" }, this._body, this._end));
    this.update(actions.running);
  }

  /** Show what the message has now; `running`: more may come. */
  update(running) {
    const node = this._node;
    this.root.classList.toggle("busy", running);
    this.root.setAttribute("aria-busy", running);
    if (node.reasoning && !this._thought) {
      this._thought = new Fold("", "thought");
      this._body.prepend(this._thought.root);
    }
    this._thought?.show(this._thoughtTitle(running), node.reasoning.trim());
    const wanted = this._asTokens && (running || node.logprobs.length) ? this._tokens : this._text;
    const other = wanted === this._tokens ? this._text : this._tokens;
    other.root.remove();
    if (wanted === this._tokens) this._tokens.show(node.logprobs);
    else this._text.show(node.content, !running);
    if (!wanted.root.parentNode) this._body.append(wanted.root);
    if (running && !node.toolCalls.length) return;
    this._end.replaceChildren(...this._calls(running), ...(running ? [] : this._ending()));
  }

  _thoughtTitle(running) {
    const { reasoningMs, content, toolCalls } = this._node;
    if (running && !content && !toolCalls.length) return "Thinking…";
    return reasoningMs === null ? "Thought" : `Thought for ${seconds(reasoningMs)}`;
  }

  _calls(running) {
    const { toolCalls } = this._node;
    const unfolded = [...this._end.querySelectorAll("details")].map((one) => one.open);
    const folds = toolCalls.map((call) => callFold(call, this._actions.results.get(call.id)));
    folds.forEach((fold, place) => { fold.open = unfolded[place] ?? false; });
    const open = toolCalls.filter((call) => !this._actions.results.has(call.id));
    const mayRespond = !running && open.length && this._actions.respond;
    return mayRespond ? [...folds, responseForm(open, this._actions.respond)] : folds;
  }

  _ending() {
    const node = this._node;
    const copied = () => node.content || node.toolCalls.map((call) => call.arguments).join("\n");
    const parts = [];
    if (node.error) {
      parts.push(element("div", { class: "failure", role: "alert" }, node.error,
        element("button", { type: "button", class: "button", onclick: this._actions.retry }, "Try again")));
    }
    parts.push(element("div", { class: "actions" }, this._actions.versions,
      (node.content || node.toolCalls.length > 0) && copyButton(copied, "Copy the answer"),
      !node.error && iconButton("retry", "Answer again", this._actions.retry),
      node.logprobs.length > 0 && this._toggle(),
      (node.usage || !node.error) && element("span", { class: "note" }, summary(node))));
    return parts;
  }

  _toggle() {
    const label = this._asTokens ? "Show text" : "Show tokens";
    const onclick = () => {
      this._asTokens = !this._asTokens;
      this.update(false);
    };
    return element("button", { type: "button", class: "text-button", onclick }, label);
  }
}

/** A title with something folded below. */
class Fold {
  constructor(title, kind) {
    this._title = element("span", {}, title);
    this._inside = element("div", { class: "inside" });
    this.root = element("details", { class: `fold ${kind}` },
      element("summary", {}, this._title), this._inside);
  }

  show(title, text) {
    if (this._title.textContent !== title) this._title.textContent = title;
    const known = this._inside.firstChild;
    if (known && text.startsWith(known.data)) known.appendData(text.slice(known.length));
    else this._inside.textContent = text;
  }
}

function callFold(call, result) {
  const brief = call.arguments.replace(/\s+/g, " ");
  const shown = element("details", { class: "fold call" },
    element("summary", {}, element("span", {}, "Calls ", element("b", {}, call.name)),
      element("span", { class: "brief" }, brief)),
    element("div", { class: "inside" }, element("pre", { tabIndex: 0 }, pretty(call.arguments))));
  if (result !== undefined) {
    shown.lastChild.append(element("h4", {}, "Result"), element("pre", { tabIndex: 0 }, pretty(result)));
    shown.querySelector("summary").append(element("span", { class: "note" }, "answered"));
  }
  return shown;
}

/** Return the form in which the user answers calls by hand. */
function responseForm(calls, respond) {
  const fields = calls.map(() => element("textarea", { rows: 2, class: "mono", spellcheck: false, required: true }));
  const form = element("form", { class: "respond" },
    ...calls.map((call, place) => element("label", {}, `Result of ${call.name}`, fields[place])),
    element("div", { class: "row" }, element("button", { class: "button main" }, "Send the result")));
  form.onsubmit = (event) => {
    event.preventDefault();
    respond(calls.map((call, place) => ({ callId: call.id, content: fields[place].value })));
  };
  return form;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not complete yet, or no JSON
  }
}

const seconds = (ms) => `${(ms / 1000).toFixed(ms < 9950 ? 1 : 0)} s`;

function summary({ usage, ms, firstMs, finish, stopped, model }) {
  const parts = [];
  if (model) parts.push(model);
  const tokens = usage?.completion_tokens;
  if (tokens) parts.push(`${tokens.toLocaleString("en")} token${tokens === 1 ? "" : "s"}`);
  if (firstMs !== null) parts.push(`first after ${firstMs < 995 ? `${Math.round(firstMs)} ms` : seconds(firstMs)}`);
  if (tokens > 1 && ms > firstMs) parts.push(`${Math.round((tokens - 1) / ((ms - firstMs) / 1000)).toLocaleString("en")} tokens/s`);
  if (finish === "length") parts.push("cut at the limit");
  if (stopped) parts.push("stopped");
  return parts.map((part) => part.replaceAll(" ", "\u00a0")).join(" · "); // a line breaks between parts
}
