// The dashboard: asks the server once a second, and draws what it says.

import { ApiError, byId, element, json, showHeader } from "./common.js";
import { Chart } from "./dashboard/chart.js";
import { count, percent, rate, seconds } from "./dashboard/format.js";
import { History, adapterKey } from "./dashboard/history.js";
import { Steps } from "./dashboard/steps.js";
import { Strip } from "./dashboard/strip.js";
import { showAdapters, showGraphs, showKernels } from "./dashboard/tables.js";

const EVERY = 1000; // milliseconds
const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];

const CHARTS = [
  { title: "Tokens per second", hint: "Over 3 s. A prompt counts when its first token is out.", format: rate,
    series: [{ key: "generated", label: "generated", colour: "--c1" }, { key: "prompt", label: "prompt", colour: "--c2" }] },
  { title: "Time to first token", hint: "Over 10 s, as exact as the histogram's buckets.", format: seconds,
    series: [{ key: "first50", label: "median", colour: "--c1" }, { key: "first99", label: "p99", colour: "--c4" }] },
  { title: "Time between tokens", hint: "Over 10 s, as exact as the histogram's buckets.", format: seconds,
    series: [{ key: "between50", label: "median", colour: "--c1" }, { key: "between99", label: "p99", colour: "--c4" }] },
  { title: "Requests", hint: "In the engine.", format: count, least: 2,
    series: [{ key: "running", label: "running", colour: "--c1" }, { key: "waiting", label: "waiting", colour: "--c5" }] },
  { title: "KV pool", hint: "Share of its blocks.", format: percent, most: 100, areas: true,
    series: [{ key: "used", label: "used", colour: "--c1" }, { key: "cached", label: "cached", colour: "--c3" },
      { key: "free", label: "free", colour: "--sunken" }] },
  { title: "Prefix cache", hint: "Prompt tokens that needed no computation, over 10 s.", format: percent, most: 100,
    series: [{ key: "hits", label: "hit", colour: "--c3" }] },
  { title: "Steps per second", hint: "Over 3 s, by whether a CUDA graph ran them.", format: rate,
    series: [{ key: "graphed", label: "in a graph", colour: "--c1" }, { key: "eager", label: "without", colour: "--c0" }],
    otherwise: [{ key: "steps", label: "without graphs", colour: "--c0" }] },
  { title: "LoRA adapters", hint: "Tokens per second, over 3 s.", format: rate, series: [], ofAdapters: true },
  { title: "Drafts", hint: "Those that were accepted, over 10 s.", format: percent, most: 100, needs: "drafts",
    series: [{ key: "accepted", label: "accepted", colour: "--c7" }] },
];

const history = new History();
const steps = new Steps();
const strip = new Strip(byId("strip"), byId("strip-tools"), steps);
const charts = CHARTS.map((options) => ({ ...options, chart: new Chart(options) }));
let stats = null; // the last answer of GET /stats
let kernelsOf = null; // which engine the table of kernels shows
let hovered = null; // the time under the pointer, the same in all charts
let isPaused = false;

async function refresh() {
  stats = await json("stats");
  history.add(stats);
  showHead();
  steps.add(await json(`timeline?since=${steps.next}`)); // also the last ones of an engine that died
  if (stats.state === "ready") await refreshKernels();
  draw();
}

async function refreshKernels() {
  const engine = stats.values.engine_restarts ?? 0;
  if (kernelsOf === engine) return;
  showKernels(byId("kernels"), await json("kernels"), stats.values.all_reduces);
  kernelsOf = engine;
}

function showHead() {
  const { model, values } = stats;
  if (model) {
    byId("model").textContent = model.names[0];
    document.title = `${model.names[0]} · Kiln`;
  }
  const facts = model ? [model.device, model.dtype, `context ${count(model.max_model_len)}`,
    model.budget && `steps of at most ${model.budget}`] : [];
  if (values.num_steps) facts.push(`${count(values.num_steps)} steps`);
  if (values.num_preemptions) facts.push(`${count(values.num_preemptions)} preemptions`);
  if (values.kv_offload_blocks) facts.push(`${count(values.kv_offload_blocks)} KV blocks in host memory`);
  facts.push(`restarts ${count(values.engine_restarts ?? 0)}`, `Kiln ${stats.version}`);
  byId("facts").replaceChildren(...facts.filter(Boolean).map((fact) => element("li", {}, fact)));
  say(stats.state === "ready" ? null : stats.message, "waiting");
}

/** Say why there is nothing new; null: there is. `action`: a button. */
function say(text, kind = "", action = null) {
  const notice = byId("notice");
  notice.hidden = text === null;
  notice.className = kind;
  notice.replaceChildren(...[text && text[0].toUpperCase() + text.slice(1), action].filter(Boolean));
}

function draw() {
  const now = stats?.time ?? Date.now() / 1000;
  const shown = (hovered === null ? null : history.at(hovered)) ?? history.last;
  choose();
  for (const { chart } of charts) {
    if (!chart.card.hidden) chart.draw(history.points, now, history.shown, shown, hovered !== null);
  }
  strip.update();
  if (!stats) return;
  showGraphs(byId("graphs"), stats.values);
  showAdapters(byId("adapters"), stats.values, history.last);
}

/** Choose the charts that have something to show, and how many stand side by side. */
function choose() {
  const adapters = Object.keys(stats?.values.lora_on_device ?? {}).sort();
  for (const { chart, needs, ofAdapters, otherwise, series } of charts) {
    chart.card.hidden = ofAdapters ? !adapters.length
      : needs !== undefined && !history.points.some((point) => point[needs]);
    if (otherwise && stats) chart.show(stats.values.num_graphs ? series : otherwise);
    if (ofAdapters && chart.series.length !== adapters.length) {
      chart.show(adapters.map((name, index) =>
        ({ key: adapterKey(name), label: name, colour: COLOURS[index % COLOURS.length] })));
    }
  }
  const visible = charts.filter(({ chart }) => !chart.card.hidden).length;
  byId("charts").dataset.columns = visible % 3 ? 4 : 3;
}

async function look(options = {}) {
  try {
    await refresh(options);
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) {
      const ask = () => json("stats", { byUser: true }).then(() => look(), () => {});
      say("This server wants its API key. ", "waiting",
        element("button", { type: "button", class: "button", onclick: ask }, "Enter the key"));
    } else if (error instanceof ApiError) say(error.message, "waiting");
    else if (error instanceof TypeError) say("The server does not answer. Trying again each second.", "down");
    else throw error;
  }
}

async function run() {
  for (;;) {
    const begun = performance.now();
    if (!document.hidden && !isPaused) await look();
    await new Promise((resolve) => setTimeout(resolve, Math.max(EVERY - (performance.now() - begun), 100)));
  }
}

function listen() {
  for (const { chart } of charts) {
    chart.canvas.onpointermove = (event) => {
      hovered = chart.timeAt(event.clientX, stats?.time ?? 0);
      draw();
    };
    chart.canvas.onpointerleave = () => {
      hovered = null;
      draw();
    };
  }
  byId("pause").onclick = () => {
    isPaused = !isPaused;
    byId("pause").textContent = isPaused ? "Go on" : "Pause";
    byId("pause").classList.toggle("main", isPaused);
  };
  new ResizeObserver(draw).observe(byId("charts"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

showHeader("dashboard");
byId("charts").append(...charts.map(({ chart }) => chart.card));
listen();
run();
