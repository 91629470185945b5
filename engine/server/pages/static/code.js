// Blocks of code: colours, the name of the language, and a button that copies.

import { copyButton } from "./clipboard.js";
import { element } from "./dom.js";
import highlighter from "./vendor/highlight/core.min.js";

const LANGUAGES = new Set(
  ("bash cpp css diff dockerfile go ini java javascript json markdown python rust shell sql " +
   "typescript xml yaml").split(" "));
const ALIASES = {
  c: "cpp", "c++": "cpp", cc: "cpp", cu: "cpp", cuda: "cpp", h: "cpp", hpp: "cpp",
  console: "shell", docker: "dockerfile", golang: "go", htm: "xml", html: "xml", js: "javascript",
  json5: "json", jsonc: "json", jsonl: "json", jsx: "javascript", md: "markdown", patch: "diff",
  py: "python", python3: "python", rs: "rust", scss: "css", sh: "bash", svg: "xml", toml: "ini",
  ts: "typescript", tsx: "typescript", yml: "yaml", zsh: "bash",
};
const loaded = new Map(); // a language and the promise of its grammar

/** Return a block that shows `code`. `info` is what stands behind the fence, such as "python". */
export function codeBlock(code, info) {
  const label = info.trim().split(/\s+/)[0].slice(0, 32);
  const shown = element("code", {}, code);
  const wanted = label.toLowerCase();
  const language = ALIASES[wanted] ?? wanted;
  if (LANGUAGES.has(language)) colour(shown, code, language);
  return element("div", { class: "code" },
    element("div", { class: "code-head" }, element("span", {}, label || "text"), copyButton(() => code)),
    element("pre", { tabIndex: 0 }, shown));
}

/** Colour code now if its grammar is here, or as soon as it is. */
function colour(shown, code, language) {
  if (highlighter.getLanguage(language)) {
    const parsed = highlighter.highlight(code, { language, ignoreIllegals: true });
    // The tree of the result, not its HTML: the pages make no HTML of text.
    shown.replaceChildren(...parsed._emitter.rootNode.children.map(coloured));
    return;
  }
  if (!loaded.has(language)) loaded.set(language, load(language));
  loaded.get(language).then((known) => known && colour(shown, code, language));
}

async function load(language) {
  try {
    const grammar = await import(`./vendor/highlight/${language}.min.js`);
    highlighter.registerLanguage(language, grammar.default);
    return true;
  } catch {
    return false; // the server went away: the code stays without colours
  }
}

function coloured(node) {
  if (typeof node === "string") return node;
  const kind = (node.scope ?? "").split(".")[0];
  return element("span", { class: `hl-${kind.replace(/[^a-z_-]/g, "")}` }, ...node.children.map(coloured));
}
