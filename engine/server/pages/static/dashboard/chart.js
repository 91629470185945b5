// A card with a chart of the last minutes: lines, or areas on top of each other.

import { element } from "../dom.js";
const HEIGHT = 132; // CSS pixels
const BOTTOM = 18; // of the labels of time
const GAP = 4; // seconds without a point after which a line breaks

/** Make a canvas that is as wide as its box, and return its context, scaled to CSS pixels. */
export function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width };
}

/** The colour of a variable of the page's style, such as "--line". */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const ago = (span) => (span < 60 ? `${span} s` : `${span / 60} min`);

/**
 * A chart of some keys of the history's points. `series`: { key, label, colour }, the last one of
 * areas on top. `format` writes a value; `most`: the top of the axis, else the largest value, and
 * `least` at least.
 */
export class Chart {
  constructor({ title, hint, series, format, most = null, least = 0, areas = false }) {
    Object.assign(this, { format, most, least, areas });
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.legend = element("dl", { class: "legend" });
    this.card = element("section", { class: "card chart" },
      element("h2", {}, title), element("p", { class: "hint" }, hint), this.legend, this.canvas);
    this.show(series);
  }

  /** Show other series. */
  show(series) {
    if (this.series === series) return;
    this.series = series;
    this.legend.classList.toggle("many", series.length > 4);
    this.values = series.map(() => element("dd"));
    this.legend.replaceChildren(...series.map((one, index) => {
      const key = element("i", { class: "key" });
      key.style.background = `var(${one.colour})`;
      return element("div", {}, element("dt", {}, key, one.label), this.values[index]);
    }));
  }

  /**
   * Draw the points of the last `span` seconds before `now`. `shown`: the point whose values are
   * written, such as the last.
   */
  draw(points, now, span, shown, isHovered) {
    this.span = span;
    points = points.filter((point) => point.t >= now - span);
    this.series.forEach((one, index) => {
      this.values[index].textContent = this.format(shown?.[one.key] ?? null);
    });
    const { context, width } = prepare(this.canvas, HEIGHT);
    if (!width) return;
    const bottom = HEIGHT - BOTTOM;
    const largest = this.most ?? niceMost(Math.max(this.least, ...points.flatMap((point) =>
      this.series.map((one) => point[one.key] ?? 0))));
    const x = (time) => width - ((now - time) / span) * width;
    const y = (value) => bottom - (value / largest) * (bottom - 8);
    this.#grid(context, width, largest, y);
    this.#restarts(context, points, bottom, x);
    if (this.areas) this.#areas(context, points, x, y);
    else for (const one of this.series) this.#line(context, points, one, x, y);
    if (isHovered && shown) {
      context.fillStyle = colour("--soft");
      context.fillRect(Math.round(x(shown.t)), 0, 1, bottom);
    }
    this.#labels(context, width, bottom, largest, y);
  }

  /** The time under a place in the window. */
  timeAt(clientX, now) {
    const box = this.canvas.getBoundingClientRect();
    return now - this.span * (1 - (clientX - box.left) / box.width);
  }

  #grid(context, width, largest, y) {
    context.fillStyle = colour("--line");
    for (const value of [0, largest / 2, largest]) context.fillRect(0, Math.round(y(value)), width, 1);
  }

  // Behind a line of their own colour, so that they can be read on the lines of the chart.
  #labels(context, width, bottom, largest, y) {
    context.font = `11px ${colour("--sans")}`;
    context.textBaseline = "alphabetic";
    context.lineJoin = "round";
    context.lineWidth = 3;
    context.strokeStyle = colour("--surface");
    context.fillStyle = colour("--soft");
    const write = (text, align, x, y) => {
      context.textAlign = align;
      context.strokeText(text, x, y);
      context.fillText(text, x, y);
    };
    for (const value of [largest / 2, largest]) write(this.format(value), "left", 0, Math.round(y(value)) + 12);
    write(`${ago(this.span)} ago`, "left", 0, bottom + 14);
    write("now", "right", width, bottom + 14);
  }

  // A line where the engine was started again.
  #restarts(context, points, bottom, x) {
    context.fillStyle = colour("--bad");
    points.forEach((point, index) => {
      const before = points[index - 1];
      if (before && point.restarts > before.restarts) context.fillRect(Math.round(x(point.t)), 0, 1, bottom);
    });
  }

  #line(context, points, one, x, y) {
    context.strokeStyle = colour(one.colour);
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.beginPath();
    let before = null;
    for (const point of points) {
      const value = point[one.key] ?? null;
      if (value === null) { before = null; continue; }
      if (before === null || point.t - before > GAP) {
        context.moveTo(x(point.t) - 1, y(value)); // a single point is a short dash
      }
      context.lineTo(x(point.t), y(value));
      before = point.t;
    }
    context.stroke();
  }

  #areas(context, points, x, y) {
    for (const run of runsOf(points, this.series[0].key)) {
      let floor = run.map(() => 0);
      for (const one of this.series) {
        const top = run.map((point, index) => floor[index] + point[one.key]);
        context.fillStyle = colour(one.colour);
        context.globalAlpha = 0.75;
        context.beginPath();
        context.moveTo(x(run[0].t) - 1, y(floor[0]));
        context.lineTo(x(run[0].t) - 1, y(top[0]));
        run.forEach((point, index) => context.lineTo(x(point.t), y(top[index])));
        run.toReversed().forEach((point, index) => context.lineTo(x(point.t), y(floor[run.length - 1 - index])));
        context.fill();
        context.globalAlpha = 1;
        floor = top;
      }
    }
  }
}

/** Points without a gap, in groups. */
function runsOf(points, key) {
  const runs = [];
  let before = null;
  for (const point of points) {
    if (point[key] === null) { before = null; continue; }
    if (before === null || point.t - before > GAP) runs.push([]);
    runs.at(-1).push(point);
    before = point.t;
  }
  return runs;
}

/** The least of 1, 2, 4, 5 and 10 times a power of ten that is no less than a value. */
export function niceMost(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 5, 10].find((one) => one * power >= value * 0.999);
}
