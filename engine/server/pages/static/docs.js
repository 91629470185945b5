// The documentation of the API, made from openapi.json: every route, field, default and meaning.

import { ApiError, BASE, byId, element, iconButton, json, openWithKey, showHeader } from "./common.js";

const KINDS = { neutral: "no effect", refused: "refused" };
let schemas = {};

const nameOf = (schema) => schema.$ref?.split("/").pop();

function typeOf(schema) {
  if (schema.$ref) return nameOf(schema);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const many = schema.anyOf ?? schema.oneOf;
  if (many) return [...new Set(many.map(typeOf))].join(" | ");
  if (schema.type === "array") {
    const inner = typeOf(schema.items ?? {});
    return (inner.includes("|") ? `(${inner})` : inner) + "[]";
  }
  if (Array.isArray(schema.type)) return schema.type.join(" | ");
  const values = schema.additionalProperties;
  if (schema.type === "object" && values && Object.keys(values).length) return `{ …: ${typeOf(values)} }`;
  return schema.type ?? "any";
}

// Null means the same as a missing field, so it need not be said of each.
const withoutNull = (type) => (type === "null" ? type : type.split(" | ").filter((one) => one !== "null").join(" | "));

/** The names of the objects in a schema, its own first, then those inside. */
function objectsIn(schema, found = new Set()) {
  if (!schema || typeof schema !== "object") return found;
  const name = nameOf(schema);
  if (name && !found.has(name)) {
    found.add(name);
    objectsIn(schemas[name], found);
  }
  Object.values(schema).forEach((part) => objectsIn(part, found));
  return found;
}

function field(name, shape, isRequired) {
  const kind = KINDS[shape["x-kiln"]];
  return element("div", { class: kind ? "field idle" : "field" },
    element("dt", {}, element("code", {}, name),
      isRequired && element("span", { class: "mark-required" }, "required"),
      kind && element("span", { class: "kind" }, kind),
      element("code", { class: "type" }, isRequired ? typeOf(shape) : withoutNull(typeOf(shape)))),
    element("dd", {}, shape.description ?? ""));
}

/** The fields of an object, under a heading. */
function fields(name, title) {
  const schema = schemas[name];
  const entries = Object.entries(schema.properties ?? {});
  const made = element("section", { class: "object" }, element("h4", {}, title ?? name));
  if (!title && schema.description) made.append(element("p", {}, plain(schema.description)));
  made.append(element("dl", {}, ...entries.map(([field_, shape]) =>
    field(field_, shape, schema.required?.includes(field_)))));
  return made;
}

// Descriptions are Python's docstrings: their line breaks and quotes of code mean nothing here.
const plain = (text) => text.split("\n\n")[0].replaceAll("``", "").replaceAll("\n", " ");

function quoted(body) {
  return `'${JSON.stringify(body).replaceAll("'", "'\\''")}'`;
}

function curl(path, method, content) {
  const lines = [`curl ${BASE.href.replace(/\/$/, "")}${path}`];
  if (method !== "get" && !content) lines[0] = lines[0].replace("curl", `curl -X ${method.toUpperCase()}`);
  if (document.documentElement.hasAttribute("data-needs-key") && path.split("/")[1] !== "health") {
    lines.push('-H "Authorization: Bearer $KILN_API_KEY"');
  }
  if (content) lines.push("-H 'Content-Type: application/json'", `-d ${quoted(content.example ?? {})}`);
  return lines.join(" \\\n  ");
}

function example(text) {
  const copy = iconButton("copy", "Copy", async () => {
    await navigator.clipboard.writeText(text);
    copy.classList.add("copied");
    setTimeout(() => copy.classList.remove("copied"), 1500);
  });
  return element("div", { class: "example" }, element("pre", { tabIndex: 0 }, text), copy);
}

function inside(path, method, operation) {
  const content = operation.requestBody?.content?.["application/json"];
  const answer = operation.responses?.["200"]?.content?.["application/json"]?.schema;
  const made = element("div", { class: "inside" });
  const more = operation.description?.split("\n\n").slice(1).join(" ").replaceAll("\n", " ");
  if (more) made.append(element("p", {}, more.replaceAll("``", "")));
  made.append(element("h3", {}, "Try it"), example(curl(path, method, content)));
  if (operation.parameters?.length) {
    made.append(element("h3", {}, "Parameters"), element("dl", {}, ...operation.parameters.map((one) =>
      field(one.name, { ...one.schema, description: plain(one.description ?? "") }, one.required))));
  }
  for (const [title, schema] of [["Body", content?.schema], ["Answer", answer]]) {
    const names = [...objectsIn(schema)];
    if (!names.length) continue;
    made.append(element("h3", {}, title), ...names.map((name) =>
      fields(name, name === nameOf(schema) ? " " : null)));
  }
  return made;
}

function route(path, method, operation) {
  const says = (operation.description ?? "").split("\n\n")[0].replaceAll("``", "").replaceAll("\n", " ");
  const box = element("details", { class: "route" },
    element("summary", {}, element("span", { class: `method ${method}` }, method.toUpperCase()),
      element("code", {}, path), element("span", { class: "says" }, says)));
  const names = [...objectsIn(operation.requestBody), ...objectsIn(operation.responses?.["200"])];
  const words = names.flatMap((name) => Object.keys(schemas[name].properties ?? {}));
  box.dataset.words = [path, says, ...words].join(" ").toLowerCase();
  // Its fields are made when they are looked at: all of them together are thousands.
  box.addEventListener("toggle", () => {
    if (box.open && !box.querySelector(".inside")) {
      box.append(inside(path, method, operation));
      mark();
    }
  });
  return box;
}

/** Hide the routes that have nothing of what is searched, and mark the fields that have. */
function mark() {
  const wanted = byId("find").value.trim().toLowerCase();
  for (const box of document.querySelectorAll(".route")) box.hidden = !box.dataset.words.includes(wanted);
  for (const group of document.querySelectorAll(".group")) {
    group.hidden = ![...group.querySelectorAll(".route")].some((box) => !box.hidden);
  }
  for (const one of document.querySelectorAll(".field")) {
    one.classList.toggle("found", wanted !== "" && one.querySelector("code").textContent.toLowerCase().includes(wanted));
  }
  const shown = document.querySelector(".group:not([hidden])");
  say(shown || !document.querySelector(".group") ? null : `Nothing here has “${byId("find").value.trim()}”.`);
}

function say(text, action = null) {
  byId("notice").hidden = text === null;
  byId("notice").replaceChildren(...[text, action].filter(Boolean));
}

function show(api) {
  schemas = api.components?.schemas ?? {};
  const groups = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags?.[0] ?? "others";
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(route(path, method, operation));
    }
  }
  byId("routes").replaceChildren(...[...groups].map(([tag, routes]) =>
    element("section", { class: "group" }, element("h2", {}, tag[0].toUpperCase() + tag.slice(1)), ...routes)));
  byId("find").oninput = mark;
  say(null);
  mark();
}

async function load(options = {}) {
  try {
    show(await json("openapi.json", options));
  } catch (error) {
    const again = element("button", { type: "button", class: "button", onclick: () => load({ byUser: true }) },
      error instanceof ApiError && error.status === 401 ? "Enter the key" : "Try again");
    if (error instanceof ApiError && error.status === 401) say("This server wants its API key.", again);
    else if (error instanceof ApiError) say(error.message, again);
    else if (error instanceof TypeError) say("The server does not answer.", again);
    else throw error;
  }
}

showHeader("docs");
byId("schema").onclick = openWithKey;
load();
