// The settings of requests: the dialog, what the browser keeps of them, and the body they make.

import { byId, element } from "./common.js";

const NAME = "kiln.settings";
const NUMBERS = [ // name, label, least, most, step
  ["temperature", "Temperature", 0, 2, "any"],
  ["top_p", "Top p", 0, 1, "any"],
  ["top_k", "Top k", -1, null, 1],
  ["min_p", "Min p", 0, 1, "any"],
  ["max_tokens", "Max tokens", 1, null, 1],
  ["seed", "Seed", null, null, 1],
  ["presence_penalty", "Presence penalty", -2, 2, "any"],
  ["frequency_penalty", "Frequency penalty", -2, 2, "any"],
  ["repetition_penalty", "Repetition penalty", 0.01, 10, "any"],
];
const OWN = { seed: "random", presence_penalty: "0", frequency_penalty: "0" };

const TOOLS_EXAMPLE = '[{ "type": "function", "function": { "name": "weather", "parameters": { "type": "object", "properties": { "city": { "type": "string" } } } } }]';

export class Settings {
  constructor() {
    this._fields = new Map();
    this._dialog = byId("settings");
    this._build();
    this._read();
    window.addEventListener("storage", (event) => event.key === NAME && this._read());
  }

  open() {
    this._dialog.showModal();
    this._dialog.scrollTop = 0;
  }

  get system() {
    return this._value("system").trim();
  }

  get wantsLogprobs() {
    return this._value("logprobs") !== "";
  }

  /** Show what the model does where a field is empty. */
  showDefaults(card) {
    const own = { ...OWN, ...card?.default_sampling_params };
    if (card?.max_model_len) own.max_tokens = `up to ${card.max_model_len}`;
    for (const [name] of NUMBERS) {
      this._fields.get(name).placeholder = name in own ? `${round(own[name])}` : "the model's own";
    }
  }

  /** Return the fields of a request's body, without those that are left to the model. */
  body() {
    const body = {};
    for (const [name] of NUMBERS) {
      if (this._value(name) !== "") body[name] = Number(this._value(name));
    }
    const stop = this._value("stop").split("\n").filter(Boolean);
    if (stop.length) body.stop = stop.map((line) => line.replaceAll("\\n", "\n"));
    if (this._value("tools").trim()) body.tools = JSON.parse(this._value("tools"));
    if (body.tools && this._value("tool_choice")) body.tool_choice = this._value("tool_choice");
    if (this._value("reasoning_effort")) body.reasoning_effort = this._value("reasoning_effort");
    if (this._value("thinking")) body.chat_template_kwargs = { enable_thinking: this._value("thinking") === "on" };
    if (this.wantsLogprobs) Object.assign(body, { logprobs: true, top_logprobs: Number(this._value("logprobs")) });
    return body;
  }

  _value(name) {
    return this._fields.get(name).value;
  }

  _build() {
    const fields = NUMBERS.map(([name, label, min, max, step]) => {
      const input = this._add(name, element("input", { type: "number", step, autocomplete: "off" }));
      if (min !== null) input.min = min;
      if (max !== null) input.max = max;
      return element("label", {}, label, input);
    });
    const area = (name, properties) => this._add(name, element("textarea", properties));
    const choice = (name, ...options) => this._add(name, element("select", {},
      ...options.map(([value, label]) => element("option", { value }, label))));
    const tools = area("tools", { rows: 4, class: "mono", spellcheck: false, placeholder: TOOLS_EXAMPLE });
    tools.oninput = () => tools.setCustomValidity(wrongTools(tools.value));
    this._form = element("form", { method: "dialog" },
      element("h2", { id: "settings-title" }, "Settings"),
      element("p", {}, "They act from the next message on. An empty field is left to the model."),
      element("label", {}, "System prompt", area("system", { rows: 3 })),
      element("h3", {}, "Sampling"),
      element("div", { class: "fields" }, ...fields),
      element("label", {}, "Stop strings, one a line (\\n is a new line)", area("stop", { rows: 2, class: "mono", spellcheck: false })),
      element("h3", {}, "Reasoning and log-probabilities"),
      element("div", { class: "fields" },
        element("label", {}, "Thinking", choice("thinking", ["", "the model's own"], ["on", "on"], ["off", "off"])),
        element("label", {}, "Effort", choice("reasoning_effort", ["", "the model's own"], ["low", "low"], ["medium", "medium"], ["high", "high"])),
        element("label", {}, "Log-probabilities", choice("logprobs", ["", "off"], ["3", "with 3 others"], ["5", "with 5 others"], ["10", "with 10 others"], ["20", "with 20 others"]))),
      element("h3", {}, "Tools"),
      element("label", {}, "Tools as JSON, as in the API", tools),
      element("label", {}, "Tool choice", choice("tool_choice", ["", "auto"], ["none", "none"], ["required", "required"])),
      element("menu", {},
        element("button", { type: "button", onclick: () => this._reset() }, "Reset"),
        element("button", { class: "main" }, "Done")));
    this._form.oninput = () => this._keep();
    this._dialog.onclose = () => this._form.checkValidity() || this._read(); // Esc on a wrong field
    this._dialog.setAttribute("aria-labelledby", "settings-title");
    this._dialog.replaceChildren(this._form);
    this.showDefaults(null);
  }

  _add(name, field) {
    this._fields.set(name, field);
    field.name = name;
    return field;
  }

  _reset() {
    for (const field of this._fields.values()) {
      field.value = "";
      field.setCustomValidity("");
    }
    this._keep();
  }

  /** Keep the settings, if they are valid: a wrong one is never sent. */
  _keep() {
    if (!this._form.checkValidity()) return;
    const values = [...this._fields].filter(([, field]) => field.value !== "");
    localStorage.setItem(NAME, JSON.stringify(Object.fromEntries(values.map(([name, field]) => [name, field.value]))));
  }

  _read() {
    const kept = JSON.parse(localStorage.getItem(NAME) ?? "{}");
    for (const [name, field] of this._fields) {
      field.value = kept[name] ?? "";
      field.setCustomValidity("");
    }
  }
}

const round = (value) => (typeof value === "number" ? Number(value.toPrecision(4)) : value);

/** Return what is wrong with the text of the tools; "" if nothing. */
function wrongTools(text) {
  if (!text.trim()) return "";
  try {
    const tools = JSON.parse(text);
    if (!Array.isArray(tools)) return "The tools are a JSON list: [{ \"type\": \"function\", … }]";
    const wrong = tools.findIndex((tool) => typeof tool?.function?.name !== "string");
    return wrong < 0 ? "" : `Tool ${wrong + 1} has no function.name`;
  } catch (error) {
    return `Not valid JSON: ${error.message}`;
  }
}
