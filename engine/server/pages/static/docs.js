import { BASE, json, openWithKey, showHeader } from "./common.js";

const element = (tag, className, text) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};
const EXAMPLES = {
  "/v1/chat/completions": { messages: [{ role: "user", content: "What is 17 + 25?" }], stream: true },
  "/v1/responses": { input: "What is 17 + 25?" },
  "/v1/messages": { messages: [{ role: "user", content: "What is 17 + 25?" }], max_tokens: 64 },
  "/v1/embeddings": { input: ["Once upon a time"] },
  "/tokenize": { prompt: "Once upon a time" },
  "/v1/completions": { prompt: "Once upon a time", max_tokens: 32 },
};
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
  return schema.type ?? "any";
}

function refsOf(schema, found = new Set()) {
  const walk = (node) => {
    if (!node || typeof node !== "object") return;
    const name = nameOf(node);
    if (name && !found.has(name)) { found.add(name); walk(schemas[name]); }
    Object.values(node).forEach(walk);
  };
  walk(schema);
  return found;
}

function fields(name) {
  const schema = schemas[name];
  const table = element("table");
  for (const [field, shape] of Object.entries(schema.properties ?? {})) {
    const row = table.insertRow();
    row.insertCell().append(element("code", "", field));
    const type = typeOf(shape);
    row.insertCell().append(element("code", "", type));
    const required = schema.required?.includes(field) && schema.additionalProperties === false;
    const notes = [required && "required", shape["x-kiln"] === "neutral" && "neutral", shape.description];
    row.insertCell().textContent = notes.filter(Boolean).join(" · ");
  }
  return table;
}

function route(path, method, operation) {
  const box = element("details");
  const head = element("summary");
  head.append(element("span", "method", method.toUpperCase()), element("code", "", path),
    element("span", "says", operation.description?.split("\n")[0] ?? ""));
  const inside = element("div", "inside");
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  const example = EXAMPLES[path];
  const data = example ? ` \\\n  -H 'Content-Type: application/json' \\\n  -d '${JSON.stringify(example)}'` : "";
  inside.append(element("h3", "", "Try"), element("pre", "", `curl ${BASE.href.replace(/\/$/, "")}${path}${data}`));
  if (body) for (const name of refsOf(body)) {
    inside.append(element("h3", "", name === nameOf(body) ? "Body" : name), fields(name));
  }
  const answer = operation.responses?.["200"]?.content?.["application/json"]?.schema;
  if (answer) for (const name of refsOf(answer)) {
    inside.append(element("h3", "", name === nameOf(answer) ? "Answer" : name), fields(name));
  }
  box.append(head, inside);
  return box;
}

showHeader("docs");
document.getElementById("schema").onclick = openWithKey;
json("openapi.json").then((document_) => {
  schemas = document_.components?.schemas ?? {};
  for (const [path, methods] of Object.entries(document_.paths))
    for (const [method, operation] of Object.entries(methods))
      document.getElementById("routes").append(route(path, method, operation));
});
