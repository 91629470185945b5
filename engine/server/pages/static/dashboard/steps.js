// The steps that the server told of, and what there is to say about some of them.

import { NONE, count, graphName, seconds } from "./format.js";

const MOST = 20000;
export const EAGER = "no graph";

/** Records of GET /timeline, oldest first, each with `start` and `end` of its bar. */
export class Steps {
  constructor() {
    this.list = [];
    this.next = 0;
  }

  /** Take an answer of GET /timeline. A server that has started again counts from 0. */
  add(answer) {
    if (answer.next < this.next) this.list = [];
    this.next = answer.next;
    for (const step of answer.steps) {
      const before = this.list.at(-1);
      const end = step.begun + step.seconds;
      const follows = before && before.engine === step.engine && before.number === step.number - 1;
      const start = Math.min(Math.max(step.begun, follows ? before.end : 0), end);
      // How long no step was in flight; negative: this step was launched so long before.
      const idle = follows ? step.begun - before.end : null;
      this.list.push({ ...step, start, end, idle });
    }
    if (this.list.length > MOST) this.list.splice(0, this.list.length - MOST);
  }

  /** The steps whose bars touch an interval of time. */
  between(from, to) {
    return this.list.slice(this.#firstEndingAfter(from), this.#firstEndingAfter(to) + 1)
      .filter((step) => step.start <= to);
  }

  /** The step at a time, or the nearest within `slack` seconds. */
  at(time, slack) {
    const index = this.#firstEndingAfter(time);
    const near = [this.list[index - 1], this.list[index]].filter(Boolean)
      .map((step) => [Math.max(step.start - time, time - step.end, 0), step])
      .sort((a, b) => a[0] - b[0])[0];
    return near && near[0] <= slack ? near[1] : null;
  }

  /** The step before (-1) or after (1) one. */
  beside(step, way) {
    return this.list[this.list.indexOf(step) + way] ?? step;
  }

  #firstEndingAfter(time) {
    let low = 0, high = this.list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.list[middle].end < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

/** One line about the steps in an interval. */
export function summary(steps, from, to) {
  if (!steps.length) return "No step in this time.";
  const lengths = steps.map((step) => step.end - step.start).sort((a, b) => a - b);
  const inGraphs = steps.filter((step) => step.graph !== null).length;
  const busy = lengths.reduce((sum, length) => sum + length, 0);
  const waited = steps.reduce((sum, step) => sum + Math.min(step.waited, step.end - step.start), 0);
  const share = (part, whole) => `${Math.round((100 * part) / whole)} %`;
  const tokens = steps.reduce((sum, step) => sum + step.generated, 0);
  const span = Math.max(steps.at(-1).end - Math.max(steps[0].start, from), 1e-6);
  return [
    `${count(steps.length)} steps in ${seconds(Math.min(to - from, span))}`,
    `${share(inGraphs, steps.length)} in CUDA graphs`,
    `median ${seconds(lengths[lengths.length >> 1])}`,
    `${count(tokens)} tokens generated`,
    `a step in flight ${share(Math.min(busy, span), span)} of the time`,
    `the host waits ${share(Math.min(waited, span), span)}`,
  ].join(" · ");
}

/** What there is to say about a step: pairs of a name and a text. */
export function details(step) {
  const idle = step.idle;
  const launched = idle === null ? null : idle <= 0
    ? `${seconds(-idle)} before the step ahead ended`
    : `${seconds(idle)} after the step ahead ended; meanwhile none was in flight`;
  return [
    ["Step", `${count(step.number)}${step.engine > 1 ? ` of engine ${step.engine}` : ""}, ${step.kind}`],
    ["CUDA graph", step.graph === null ? `none: ${step.why_eager}` : graphName(step.graph)],
    ["Requests", count(step.requests)],
    ["Tokens computed", step.drafts ? `${count(step.tokens)}, of them ${count(step.drafts)} drafts` : count(step.tokens)],
    ["Tokens generated", count(step.generated)],
    ["Bar", seconds(step.end - step.start)],
    ["From launch to tokens", seconds(step.seconds)],
    ["The host only waited", seconds(step.waited)],
    ["Launched", launched ?? NONE],
  ];
}
