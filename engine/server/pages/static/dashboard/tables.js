// The tables below the charts: CUDA graphs, LoRA adapters, and the kernels with their reasons.

import { element } from "../dom.js";
import { bytes, count, graphName, rate, seconds } from "./format.js";
import { adapterKey } from "./history.js";

function table(head, rows) {
  const made = element("table", {}, element("thead", {}, element("tr", {},
    ...head.map((name) => element("th", { scope: "col" }, name)))), element("tbody"));
  for (const cells of rows) {
    made.tBodies[0].append(element("tr", {}, ...cells.map((cell, index) => {
      const made = element("td", {}, cell);
      made.dataset.name = head[index];
      return made;
    })));
  }
  return element("div", { class: "scroll" }, made);
}

/** Rows of a name, a number, and a bar of its share; the largest first. */
function bars(values, variable, nameOf = (name) => name) {
  const entries = Object.entries(values).filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
  const most = entries[0]?.[1];
  return element("ul", { class: "bars" }, ...entries.map(([name, value]) => {
    const bar = element("i");
    bar.style.width = `${(100 * value) / most}%`;
    bar.style.background = `var(${variable})`;
    return element("li", {}, element("span", {}, nameOf(name)), element("div", {}, bar), element("b", {}, count(value)));
  }));
}

/** The CUDA graphs: how often each size was replayed, and why steps ran without one. */
export function showGraphs(box, values) {
  const replays = values.graph_replays ?? {}, reasons = values.graph_fallbacks ?? {};
  const sum = (counts) => Object.values(counts).reduce((all, one) => all + one, 0);
  const inGraphs = sum(replays), without = sum(reasons);
  const captured = values.num_graphs ?? 0;
  box.replaceChildren(element("h2", {}, "CUDA graphs"), element("p", { class: "hint" }, captured
    ? `${count(captured)} captured in ${seconds(values.graph_capture_seconds)}, ${bytes(values.graph_bytes)}. `
      + `Of ${count(inGraphs + without)} steps since the start, ${count(inGraphs)} replayed one.`
    : "This engine has no CUDA graphs: every step launches its kernels one by one."));
  if (inGraphs) box.append(element("h3", {}, "Replays by size"), bars(replays, "--c1", graphName));
  if (without) box.append(element("h3", {}, "Steps without a graph, by reason"), bars(reasons, "--c0"));
}

/** The LoRA adapters: their requests and tokens. `point`: the last of the history. */
export function showAdapters(box, values, point) {
  const names = Object.keys(values.lora_on_device ?? {}).sort();
  box.hidden = !names.length;
  if (!names.length) return;
  const of = (metric, name) => values[metric]?.[name] ?? 0;
  box.replaceChildren(element("h2", {}, "LoRA adapters"), table(
    ["Adapter", "On the device", "Running", "Waiting", "Tokens/s", "Tokens", "Copies to device"],
    names.map((name) => [
      name, of("lora_on_device", name) ? "yes" : "no", count(of("lora_requests_running", name)),
      count(of("lora_requests_waiting", name)), rate(point?.[adapterKey(name)] ?? null),
      count(of("lora_generation_tokens", name)), count(of("lora_placements", name)),
    ])));
}

/** What computes: the implementation of each kernel family, and why it was chosen. */
export function showKernels(box, status, sums) {
  const rows = Object.entries(status.kernels).map(([family, choice]) =>
    [family, choice.implementation, choice.reason]);
  const reduce = status.all_reduce;
  if (reduce) {
    const counted = Object.entries(sums ?? {}).map(([name, number]) => `${name} ${count(number)}`).join(", ");
    rows.push(["all_reduce", reduce.implementation, reduce.reason + (counted ? ` · sums: ${counted}` : "")]);
  }
  box.replaceChildren(element("h2", {}, "Kernels"),
    element("p", { class: "hint" }, "The implementation of each kernel family, and why it was chosen."),
    table(["Family", "Implementation", "Reason"], rows));
}
