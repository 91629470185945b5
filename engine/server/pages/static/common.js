// What all pages share: calls of the API with the key, the header, and the state of the server.

import { byId, element, icon, iconButton } from "./dom.js";
import { askForKey, changeKey, currentKey, mayAsk } from "./key.js";

export { byId, element, icon, iconButton };

// The server's own address, also behind a proxy that puts a prefix before every path.
export const BASE = new URL("../", import.meta.url);

const LINKS = [
  ["chat", "Chat", ""],
  ["dashboard", "Dashboard", "dashboard"],
  ["docs", "API", "docs"],
  ["metrics", "Metrics", "metrics"],
];
// The server marks its pages if it has a key, so that no request need fail to find out.
const NEEDS_KEY = document.documentElement.hasAttribute("data-needs-key");
const READY_MS = 5000; // between two looks at a server that is ready
const WAITING_MS = 1000; // and at one that is not

/** An answer that is no success. `code` and `message` are the server's, `retryAfter` in seconds. */
export class ApiError extends Error {
  constructor(message, status, code = null, retryAfter = null) {
    super(message);
    this.name = "ApiError";
    Object.assign(this, { status, code, retryAfter });
  }
}

/**
 * Fetch a path of the server, such as "v1/models", with the key. Returns any Response but a 401,
 * on which it asks for the key and tries again. `options` are those of fetch, and `byUser`: the
 * user asked for it just now, so the dialog opens even if it was closed before.
 * Throws ApiError 401 if no key is given, TypeError if the server cannot be reached.
 */
export async function api(path, { byUser = false, ...options } = {}) {
  for (;;) {
    const key = currentKey();
    if (key === null && NEEDS_KEY && !(mayAsk(byUser) && (await askForKey()))) {
      throw new ApiError("this server wants its API key", 401, "invalid_api_key");
    }
    if (currentKey() !== key) continue;
    const headers = new Headers(options.headers);
    if (key !== null) headers.set("Authorization", `Bearer ${encodeKey(key)}`);
    const response = await fetch(new URL(path, BASE), { ...options, headers });
    if (response.status !== 401) return response;
    if (currentKey() !== key) continue; // entered meanwhile, for another call
    if (!mayAsk(byUser) || !(await askForKey())) throw await errorOf(response);
  }
}

/** Fetch a path as `api` does and return its JSON. Throws ApiError if it is no success. */
export async function json(path, options = {}) {
  const response = await api(path, options);
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

/** Return the error that a response describes. */
export async function errorOf(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `the server answered ${response.status}`;
  const after = response.headers.get("Retry-After");
  return new ApiError(message, response.status, body?.error?.code, after === null ? null : Number(after));
}

// A header holds bytes, and fetch takes one character for each.
const encodeKey = (key) => String.fromCharCode(...new TextEncoder().encode(key));

/**
 * Watch the server: `report({ state, message })` now and at each change. States: "ready";
 * "waiting" with the server's reason (it loads, restarts or drains); "down", it does not answer.
 */
export function watchServer(report) {
  let last = null;
  const look = async () => {
    const now = document.hidden && last ? last : await readiness();
    if (now && (now.state !== last?.state || now.message !== last?.message)) report(now);
    last = now;
    setTimeout(look, now?.state === "ready" ? READY_MS : WAITING_MS);
  };
  look();
}

/** Look at the server once. */
export async function readiness() {
  try {
    const response = await fetch(new URL("health/ready", BASE));
    if (response.ok) return { state: "ready", message: "Ready" };
    return { state: "waiting", message: (await errorOf(response)).message };
  } catch {
    return { state: "down", message: "The server does not answer" };
  }
}

/**
 * Fill `<header id="top">` of a page: the name, the state of the server, and the links. `report` is
 * called as by `watchServer`.
 */
export function showHeader(current, report = () => {}) {
  const dot = element("span", { class: "dot", "role": "img", "aria-label": "Looking at the server" });
  const key = iconButton("key", "API key", changeKey);
  const links = LINKS.map(([name, label, path]) => {
    const link = element("a", { href: new URL(path, BASE).pathname }, label);
    if (name === current) link.setAttribute("aria-current", "page");
    if (name === "metrics") link.onclick = openWithKey;
    return link;
  });
  byId("top").replaceChildren(
    element("a", { class: "mark", href: BASE.pathname, "aria-label": "Kiln" }, icon("flame"), "Kiln"),
    dot,
    element("nav", { "aria-label": "Pages" }, ...links),
    key);
  const showKey = () => { key.hidden = currentKey() === null; };
  window.addEventListener("kiln-key", showKey);
  window.addEventListener("storage", showKey);
  showKey();
  watchServer(({ state, message }) => {
    dot.className = `dot ${state}`;
    dot.title = message;
    dot.setAttribute("aria-label", message);
    report({ state, message });
  });
}

/** Follow a link of the API to text: with the key, which the browser itself does not send. */
export async function openWithKey(event) {
  if (currentKey() === null) return;
  event.preventDefault();
  const path = event.currentTarget.href;
  const response = await api(path, { byUser: true });
  const text = new Blob([await response.text()], { type: "text/plain;charset=utf-8" });
  location.assign(URL.createObjectURL(text));
}
