// Markdown as elements. The library reads it into tokens; here each token becomes an element of a
// fixed set. What a model writes is never read as HTML, so there is nothing to sanitize.

import "./vendor/markdown-it.umd.min.js";
import { codeBlock } from "./code.js";
import { element } from "./dom.js";

// A single newline is a line break: models mean it so.
const reader = globalThis.markdownit({ html: false, linkify: true, breaks: true });
reader.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // main.py is no web site
const TAGS = new Set(
  ("p h1 h2 h3 h4 h5 h6 ul ol li blockquote strong em s table thead tbody tr th td").split(" "));
const SAFE_LINK = /^(https?|mailto):/i;
const SAFE_IMAGE = /^data:image\/(png|jpeg|gif|webp);base64,/i;
const DEFINITION = /^ {0,3}\[[^\]]+\]:/m; // [name]: https://…, which links anywhere may refer to

/** Shows a text that grows. Only its last block is read again when more of it arrives. */
export class MarkdownView {
  constructor() {
    this.root = element("div", { class: "markdown" });
    this._settled = 0; // characters of the blocks that will not change
    this._open = []; // elements of the block that may
    this._context = {}; // definitions of links so far
  }

  /** Show a text, which begins with what was shown before. `ended`: no more will come. */
  show(written, ended = false) {
    const text = written.replace(/\r\n?/g, "\n"); // as the library counts lines
    if (ended && DEFINITION.test(text)) { // an early link may refer to a late definition
      this._settled = 0;
      this._context = {};
      this.root.replaceChildren();
      this._open = [];
    }
    const rest = text.slice(this._settled);
    const tokens = reader.parse(rest, this._context);
    const last = lastBlock(tokens);
    for (const node of this._open) node.remove();
    const settled = build(tokens.slice(0, last));
    const open = build(tokens.slice(last));
    this._open = [...open.childNodes];
    this.root.append(settled, open);
    if (last > 0) this._settled += startOfLine(rest, tokens[last].map[0]);
  }
}

/** Return the place of the token that opens the last block. */
function lastBlock(tokens) {
  let last = 0;
  tokens.forEach((token, place) => {
    if (token.level === 0 && token.nesting >= 0 && token.map) last = place;
  });
  return last;
}

function startOfLine(text, line) {
  let start = 0;
  while (line-- > 0) start = text.indexOf("\n", start) + 1;
  return start;
}

/** Return the elements of some tokens, as a fragment. */
function build(tokens) {
  const made = document.createDocumentFragment();
  const stack = [made];
  for (const token of tokens) {
    const parent = stack.at(-1);
    if (token.nesting < 0) stack.pop();
    else if (token.nesting > 0) stack.push(opened(token, parent));
    else if (token.type === "inline") parent.append(build(token.children));
    else if (!token.hidden) parent.append(leaf(token));
  }
  return made;
}

/** Append the element that a token opens, and return where its children go. */
function opened(token, parent) {
  if (token.hidden) return parent; // a paragraph of a tight list
  if (token.type === "link_open") return append(parent, link(token.attrGet("href")));
  if (!TAGS.has(token.tag)) throw new Error(`no element for the Markdown token ${token.type}`);
  const made = element(token.tag);
  const align = /^text-align:(left|right|center)$/.exec(token.attrGet("style") ?? "");
  if (align) made.style.textAlign = align[1];
  if (token.attrGet("start")) made.start = Number(token.attrGet("start"));
  append(token.tag === "table" ? append(parent, element("div", { class: "wide", tabIndex: 0 })) : parent, made);
  return made;
}

function append(parent, child) {
  parent.append(child);
  return child;
}

function leaf(token) {
  switch (token.type) {
    case "text": return token.content;
    case "softbreak":
    case "hardbreak": return element("br");
    case "hr": return element("hr");
    case "code_inline": return element("code", {}, token.content);
    case "fence":
    case "code_block": return codeBlock(token.content.replace(/\n$/, ""), token.info ?? "");
    case "image": return image(token.attrGet("src"), token.content);
    default: return token.content; // HTML among others: as text
  }
}

/** A link to another site opens a tab that cannot reach this page; any other is only text. */
function link(href) {
  if (!SAFE_LINK.test(href)) return element("span", { title: href });
  return element("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" });
}

/** Images inside the text are shown. To load one would tell its server who reads: it is a link. */
function image(source, text) {
  if (SAFE_IMAGE.test(source)) return element("img", { src: source, alt: text });
  const shown = link(source);
  shown.append(`Image: ${text || source}`);
  return shown;
}
