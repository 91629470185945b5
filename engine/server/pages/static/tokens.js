// The tokens of an answer, coloured by their probability; a table of the alternatives on hover, on
// a tap, and by arrow keys.

import { element } from "./dom.js";

const card = element("div", { id: "token-card", role: "tooltip", hidden: true });
const shownFor = (node) => node?.closest?.(".token");

function hide() {
  document.querySelector(".token.active")?.classList.remove("active");
  card.hidden = true;
}

// The token moves away under it.
for (const kind of ["scroll", "resize"]) addEventListener(kind, hide, { capture: true, passive: true });

/** Shows positions of log-probabilities that grow in number. */
export class TokensView {
  constructor() {
    this.root = element("div", {
      class: "tokens", tabIndex: 0, role: "group",
      "aria-label": "Tokens with their probabilities: arrow keys go from one to the next",
    });
    this._shown = 0;
    this._positions = [];
    this._active = -1;
    this._decoder = new TextDecoder();
    this.root.onpointerover = (event) => this._show(shownFor(event.target));
    this.root.onpointerleave = () => this._show(null);
    this.root.onclick = (event) => this._show(shownFor(event.target));
    this.root.onkeydown = (event) => this._move(event);
    this.root.onblur = () => this._show(null);
  }

  /** Show all positions, of which those before were shown. */
  show(positions) {
    this._positions = positions;
    const fresh = positions.slice(this._shown).map((position) => this._token(position));
    this._shown = positions.length;
    this.root.append(...fresh);
  }

  _token({ token, bytes, logprob }) {
    // A character may be spread over several tokens: it is shown with the last of them.
    const text = bytes ? this._decoder.decode(new Uint8Array(bytes), { stream: true }) : token;
    const made = element("span", { class: "token" }, text || "·");
    const doubt = 1 - Math.exp(logprob);
    if (doubt > 0.05) made.style.setProperty("--doubt", `${Math.round(doubt * 70)}%`);
    return made;
  }

  _move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape" && !card.hidden) {
      event.stopPropagation();
      this._show(null);
    }
    if (!step) return;
    event.preventDefault();
    const place = Math.min(Math.max(this._active + step, 0), this._shown - 1);
    this._show(this.root.children[place]);
  }

  _show(token) {
    hide();
    if (!token) return;
    card.hidden = false;
    token.classList.add("active");
    this._active = [...this.root.children].indexOf(token);
    const position = this._positions[this._active];
    card.replaceChildren(table(position));
    if (!card.isConnected) document.body.append(card);
    place(token.getBoundingClientRect());
  }
}

function table({ token, logprob, top }) {
  const rows = top.some((one) => one.token === token) ? top : [{ token, logprob }, ...top];
  return element("table", {},
    element("thead", {}, element("tr", {},
      element("th", {}, "Token"), element("th", {}, "Probability"), element("th", {}, "Log"))),
    element("tbody", {}, ...rows.map((one) => {
      const bar = element("i");
      bar.style.width = `${100 * Math.exp(one.logprob)}%`;
      return element("tr", { class: one.token === token ? "chosen" : "" },
        element("td", {}, element("code", {}, visible(one.token))),
        element("td", { class: "bar" }, bar, element("span", {}, percent(one.logprob))),
        element("td", {}, one.logprob.toFixed(2)));
    })));
}

const visible = (token) => token.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(empty)";

function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  return value < 0.01 ? "<0.01 %" : `${value < 10 ? value.toFixed(2) : value.toFixed(1)} %`;
}

/** Put the table below a token, or above it where there is no room. */
function place(box) {
  const { offsetWidth: width, offsetHeight: height } = card;
  const below = box.bottom + 6;
  card.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
  card.style.top = `${below + height < innerHeight ? below : Math.max(8, box.top - height - 6)}px`;
}
