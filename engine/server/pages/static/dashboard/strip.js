// The steps as bars in time, which can be paused, moved, zoomed and looked at one by one.

import { element, iconButton } from "../dom.js";
import { colour, niceMost, prepare } from "./chart.js";
import { clock, count, graphName, seconds } from "./format.js";
import { EAGER, details, summary } from "./steps.js";

const HEIGHT = 116;
const BARS = 62; // the height of the bars, and below it of the host's row
const HOST = 10;
const LEAST_SPAN = 0.002, MOST_SPAN = 300; // seconds
const NEAR = 8; // CSS pixels from a step at which it still is meant
const KINDS = { decode: "--c1", prefill: "--c2", mixed: "--c4" };
// The hues of graphs by size, of decode steps and of others, from the smallest to the largest.
const HUES = { decode: [46, -28], other: [168, 268] };

/** The strip of some Steps, its buttons, and what is said about the step that is chosen. */
export class Strip {
  constructor(box, tools, steps) {
    this.steps = steps;
    this.span = null; // seconds; chosen when the first steps are there
    this.end = 0; // the time at the right edge
    this.live = true;
    this.by = "graph";
    this.chosen = null;
    this.sizes = new Map(); // of graphs that were seen, and whether a decode step ran in them
    this.canvas = element("canvas", {
      tabIndex: 0, role: "application",
      "aria-label": "Steps in time. Left and right choose a step, plus and minus zoom.",
    });
    this.legend = element("ul", { class: "keys" });
    this.line = element("p", { class: "hint" });
    this.about = element("dl", { class: "about", "aria-live": "polite" });
    box.append(this.canvas, this.legend, this.line, this.about);
    this.follow = element("button", { type: "button", class: "button small", onclick: () => this.goLive() }, "Live");
    tools.append(this.#choice(), iconButton("minus", "Zoom out", () => this.zoom(2)),
      iconButton("plus", "Zoom in", () => this.zoom(0.5)), this.follow);
    this.#listen();
  }

  /** Show the newest steps, unless the user looks at earlier ones. */
  update() {
    for (const step of this.steps.list.slice(-2000)) {
      if (step.graph !== null && !this.sizes.has(step.graph)) this.sizes.set(step.graph, step.kind === "decode");
    }
    if (this.live && this.steps.list.length) this.end = this.steps.list.at(-1).end;
    if (this.span === null && this.steps.list.length > 50) this.span = this.#usualSpan();
    this.draw();
  }

  goLive() {
    this.live = true;
    this.update();
  }

  /** Multiply the time that is shown; the time at `x`, a share of the width, stays where it is. */
  zoom(factor, x = this.live ? 1 : 0.5) {
    const span = this.span ?? 1;
    const fixed = this.end - span * (1 - x);
    this.span = Math.min(Math.max(span * factor, LEAST_SPAN), MOST_SPAN);
    if (!this.live) this.end = fixed + this.span * (1 - x);
    this.draw();
  }

  move(time) {
    if (!this.steps.list.length) return;
    this.live = false;
    const first = this.steps.list[0].start, last = this.steps.list.at(-1).end;
    this.end = Math.min(Math.max(this.end + time, first + this.span / 10), last + this.span / 2);
    this.draw();
  }

  choose(step) {
    this.chosen = step;
    this.draw();
  }

  draw() {
    const span = this.span ?? 1, from = this.end - span;
    const { context, width } = prepare(this.canvas, HEIGHT);
    this.follow.setAttribute("aria-pressed", this.live);
    if (!width) return;
    const shown = this.steps.between(from, this.end);
    const x = (time) => ((time - from) / span) * width;
    const top = HEIGHT - BARS - HOST - 26;
    context.fillStyle = colour("--sunken");
    context.fillRect(0, top, width, BARS);
    context.fillRect(0, top + BARS + 4, width, HOST);
    const colours = Object.fromEntries(this.#keys());
    const host = colour("--text"), ground = colour("--sunken");
    for (const step of shown) {
      const left = x(step.start), wide = x(step.end) - left;
      context.fillStyle = colours[this.#key(step)];
      context.fillRect(left, top, Math.max(wide - (wide > 4 ? 1 : 0), 0.6), BARS);
      const waits = Math.min(step.waited, step.end - step.start);
      context.fillStyle = host;
      context.globalAlpha = 0.55;
      context.fillRect(left, top + BARS + 4, Math.max(x(step.end - waits) - left, 0), HOST);
      context.globalAlpha = 0.12;
      context.fillRect(x(step.end - waits), top + BARS + 4, x(step.end) - x(step.end - waits), HOST);
      context.globalAlpha = 1;
      if (wide > 26) this.#label(context, step, left, wide, top, ground);
    }
    this.#axis(context, width, from, span);
    if (this.chosen) this.#mark(context, x, top);
    this.#tell(shown, from);
  }

  #label(context, step, left, wide, top, ground) {
    const text = step.graph ?? `${count(step.tokens)} tokens`;
    context.font = `600 11px ${colour("--sans")}`;
    if (context.measureText(text).width > wide - 10) return;
    context.fillStyle = ground;
    context.textAlign = "left";
    context.fillText(text, left + 5, top + 16);
  }

  #mark(context, x, top) {
    context.strokeStyle = colour("--text");
    context.lineWidth = 2;
    const left = x(this.chosen.start);
    context.strokeRect(left - 1, top - 1, Math.max(x(this.chosen.end) - left, 2) + 1, BARS + 2);
  }

  #axis(context, width, from, span) {
    const every = niceMost(span / Math.max(2, width / 140));
    context.font = `11px ${colour("--sans")}`;
    context.fillStyle = colour("--soft");
    for (let age = 0; age <= span; age += every) {
      const at = width * (1 - age / span);
      context.textAlign = age === 0 ? "right" : at < 40 ? "left" : "center";
      context.fillText(age === 0 ? clock(this.end) : `−${seconds(age)}`, at < 40 ? Math.max(at, 0) : at, HEIGHT - 6);
    }
  }

  #tell(shown, from) {
    const keys = this.#keys();
    const counts = new Map();
    for (const step of shown) counts.set(this.#key(step), (counts.get(this.#key(step)) ?? 0) + 1);
    this.legend.replaceChildren(...keys.filter(([name]) => counts.has(name)).map(([name, its]) => {
      const key = element("i", { class: "key" });
      key.style.background = its;
      return element("li", {}, key, this.by === "graph" ? graphName(name) : name, element("b", {}, count(counts.get(name))));
    }));
    this.line.textContent = this.steps.list.length ? summary(shown, from, this.end)
      : "No steps yet: send the server a request.";
    this.about.replaceChildren(...(this.chosen ? details(this.chosen) : []).map(([name, text]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, text))));
    this.about.hidden = !this.chosen;
  }

  #key(step) {
    return this.by === "kind" ? step.kind : step.graph ?? EAGER;
  }

  // What colours stand for: pairs of a name and a colour.
  #keys() {
    if (this.by === "kind") return Object.entries(KINDS).map(([name, variable]) => [name, colour(variable)]);
    const light = colour("--bar-light");
    const hued = (isDecode, [first, last]) => {
      const sizes = [...this.sizes.keys()].filter((size) => this.sizes.get(size) === isDecode);
      sizes.sort((a, b) => parseInt(a) - parseInt(b) || (a < b ? -1 : 1));
      return sizes.map((size, index) => {
        const hue = first + ((last - first) * index) / Math.max(sizes.length - 1, 1);
        return [size, `hsl(${(hue + 360) % 360} 62% ${light})`];
      });
    };
    return [...hued(true, HUES.decode), ...hued(false, HUES.other), [EAGER, colour("--c0")]];
  }

  #choice() {
    const select = element("select", { "aria-label": "Colour of a bar" },
      element("option", { value: "graph" }, "colour: CUDA graph"),
      element("option", { value: "kind" }, "colour: kind of step"));
    select.onchange = () => {
      this.by = select.value;
      this.draw();
    };
    return select;
  }

  #usualSpan() {
    const lengths = this.steps.list.slice(-200).map((step) => step.end - step.start).sort((a, b) => a - b);
    return Math.min(Math.max(40 * lengths[lengths.length >> 1], 0.05), 10);
  }

  #timeAt(event) {
    const box = this.canvas.getBoundingClientRect();
    return this.end - (this.span ?? 1) * (1 - (event.clientX - box.left) / box.width);
  }

  #stepAt(event) {
    return this.steps.at(this.#timeAt(event), (NEAR * (this.span ?? 1)) / this.canvas.clientWidth);
  }

  #listen() {
    let dragged = null; // where the pointer was, while it is down
    let moved = false;
    this.canvas.onpointerdown = (event) => {
      dragged = event.clientX;
      moved = false;
      this.canvas.setPointerCapture(event.pointerId);
    };
    this.canvas.onpointermove = (event) => {
      if (dragged === null) {
        if (event.pointerType === "mouse") this.choose(this.#stepAt(event));
        return;
      }
      if (!moved && Math.abs(event.clientX - dragged) < 4) return;
      moved = true;
      this.move(((dragged - event.clientX) / this.canvas.clientWidth) * (this.span ?? 1));
      dragged = event.clientX;
    };
    this.canvas.onpointerup = (event) => {
      if (!moved) {
        this.live = false; // so that what is looked at stays
        this.choose(this.#stepAt(event));
      }
      dragged = null;
    };
    this.canvas.onpointercancel = () => { dragged = null; };
    this.canvas.addEventListener("wheel", (event) => this.#onWheel(event), { passive: false });
    this.canvas.onkeydown = (event) => this.#onKey(event);
  }

  // A plain wheel scrolls the page; with Ctrl, as a pinch sends it, it zooms; sideways it moves.
  #onWheel(event) {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!event.ctrlKey && !sideways) return;
    event.preventDefault();
    const box = this.canvas.getBoundingClientRect();
    if (sideways) this.move((event.deltaX / box.width) * (this.span ?? 1));
    else this.zoom(1.2 ** Math.sign(event.deltaY), (event.clientX - box.left) / box.width);
  }

  #onKey(event) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (way && this.steps.list.length) {
      this.live = false;
      const next = this.chosen ? this.steps.beside(this.chosen, way) : this.steps.list.at(-1);
      if (next.end > this.end || next.start < this.end - this.span) this.end = next.end + this.span / 2;
      this.choose(next);
    } else if (event.key === "+") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "Escape") this.choose(null);
    else return;
    event.preventDefault();
  }
}
