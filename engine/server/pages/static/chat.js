"use strict";
const $ = (id) => document.getElementById(id);
const IDEAS = ["What is 17 + 25?", 'Reverse the word "kiln".', "Sort these numbers: 9, 2, 7, 4", "Who are you?"];
let history = [];
let running = null;   // the AbortController of the current answer
let plain = false;    // the model has no chat template: continue the text instead

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function flame() {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", "#flame");
  svg.append(use);
  return svg;
}

function welcome() {
  const box = element("div");
  box.id = "welcome";
  const ideas = element("div");
  ideas.id = "ideas";
  for (const idea of IDEAS) {
    const button = element("button", "", idea);
    button.type = "button";
    button.onclick = () => ask(idea);
    ideas.append(button);
  }
  box.append(
    flame(), element("h1", "", "Say something"),
    element("p", "", "This page talks to the model through the same API as your programs."),
    ideas);
  $("talk").replaceChildren(box);
}

function addTurn(role, text) {
  $("welcome")?.remove();
  const turn = element("div", "turn " + role);
  const body = element("div", "body", text);
  if (role === "assistant") {
    const column = element("div");
    column.append(body);
    turn.append(flame(), column);
  } else turn.append(body);
  $("talk").append(turn);
  $("scroll").scrollTop = $("scroll").scrollHeight;
  return { turn, body, column: body.parentElement };
}

function settings() {
  const chosen = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"])
    if ($(name).value !== "") chosen[name] = Number($(name).value);
  return chosen;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function body() {
  const shared = { stream: true, stream_options: { include_usage: true }, ...settings() };
  if (plain) return { prompt: history.map((m) => m.content).join("\n"), max_tokens: 128, ...shared };
  const system = $("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  return { messages: [...first, ...history], ...shared };
}

async function request(signal) {
  const route = plain ? "/v1/completions" : "/v1/chat/completions";
  const response = await fetch(route, {
    method: "POST", signal, body: JSON.stringify(body()),
    headers: { "Content-Type": "application/json" },
  });
  if (response.ok) return response;
  const problem = await response.json().catch(() => null);
  const message = problem?.error?.message ?? `the server answered ${response.status}`;
  if (!plain && message.includes("no chat template")) {
    plain = true;
    return request(signal);
  }
  throw new Error(message);
}

async function ask(text) {
  if (running || !text.trim()) return;
  const talk = history;  // "New chat" may replace it while the answer streams
  talk.push({ role: "user", content: text });
  addTurn("user", text);
  const { turn, body, column } = addTurn("assistant", "");
  turn.classList.add("busy");
  running = new AbortController();
  showButton();
  const started = performance.now();
  let first = 0, answer = "", thought = "", usage = null, reason = "";
  try {
    for await (const chunk of events(await request(running.signal))) {
      if (chunk.error) throw new Error(chunk.error.message);
      first ||= performance.now();
      usage = chunk.usage ?? usage;
      for (const choice of chunk.choices) {
        answer += choice.delta?.content ?? choice.text ?? "";
        thought += choice.delta?.reasoning ?? "";
        reason = choice.finish_reason ?? reason;
      }
      const near = $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight < 80;
      body.textContent = answer || thought;
      if (near) $("scroll").scrollTop = $("scroll").scrollHeight;
    }
    column.append(element("div", "note", summary(usage, started, first, reason)));
    talk.push({ role: "assistant", content: answer });
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (stopped && answer) talk.push({ role: "assistant", content: answer });
    else talk.pop();  // an unanswered question would confuse the next answer
    column.append(element("div", stopped ? "note" : "note error", stopped ? "stopped" : error.message));
  }
  turn.classList.remove("busy");
  running = null;
  showButton();
  $("input").focus();
}

function summary(usage, started, first, reason) {
  const tokens = usage?.completion_tokens ?? 0;
  const seconds = (performance.now() - first) / 1000;
  const parts = [`${tokens} token${tokens === 1 ? "" : "s"}`, `first after ${Math.round(first - started)} ms`];
  if (tokens > 1 && seconds > 0) parts.push(`${Math.round((tokens - 1) / seconds)} tokens/s`);
  if (reason === "length") parts.push("cut at the limit");
  return parts.join(" · ");
}

function showButton() {
  $("send").textContent = running ? "■" : "↑";
  $("send").setAttribute("aria-label", running ? "Stop" : "Send");
  $("send").disabled = !running && !$("input").value.trim();
}

function fit() {
  $("input").style.height = "auto";
  $("input").style.height = $("input").scrollHeight + "px";
  showButton();
}

function submit(event) {
  event.preventDefault();
  if (running) return running.abort();
  const text = $("input").value;
  $("input").value = "";
  fit();
  ask(text);
}

async function lookAround() {
  const ready = await fetch("/health/ready").then((r) => r.ok, () => null);
  $("dot").className = "dot " + (ready ? "ready" : ready === null ? "down" : "");
  const [card] = await fetch("/v1/models").then((r) => r.json()).then((r) => r.data, () => [null]);
  if (card) {
    $("model").textContent = card.id;
    $("context").textContent = card.max_model_len ? `${card.max_model_len} tokens` : "loading";
    document.title = `Kiln · ${card.id}`;
  }
  const text = await fetch("/metrics").then((r) => r.text(), () => "");
  const value = (name) => Number(text.match(new RegExp(`^kiln:${name}\\{.*\\} (\\S+)$`, "m"))?.[1] ?? NaN);
  const shown = [
    [value("num_requests_running"), "running"], [value("num_requests_waiting"), "waiting"],
    [Math.round(100 * value("kv_blocks_used") / value("kv_blocks_total")), "% of KV blocks"],
    [value("generation_tokens_total"), "tokens generated"],
    [Math.round(100 * value("prefix_cache_hits_total") / value("prefix_cache_queries_total")),
      "% of prompt tokens cached"],
  ].filter(([number]) => Number.isFinite(number));
  $("load").replaceChildren(...shown.map(([number, unit]) =>
    element("span", "", number.toLocaleString("en") + (unit[0] === "%" ? unit : " " + unit))));
}

$("form").onsubmit = submit;
$("input").oninput = fit;
$("input").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
};
$("fresh").onclick = () => { running?.abort(); history = []; plain = false; welcome(); $("input").focus(); };
$("open-settings").onclick = () => $("settings").showModal();
welcome();
showButton();
lookAround();
setInterval(() => document.hidden || lookAround(), 3000);
