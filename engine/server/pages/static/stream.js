// The answer to a chat, as it arrives: server-sent events of the API, merged into one reply.

import { api, errorOf } from "./common.js";

/** Yield the JSON of each event. Throws an Error if the stream ends early or holds an error. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      const data = part.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

/** Return what is known of an answer before it begins. */
export function newReply() {
  return { role: "assistant", content: "", reasoning: "", toolCalls: [], logprobs: [], usage: null, finish: null, seed: null, error: null, firstMs: null, reasoningMs: null, ms: null };
}

/**
 * Ask for an answer and merge it into `reply`; call `changed` after each part. `body` has the
 * messages and settings. A model without a chat template continues the texts of the messages.
 * Throws ApiError, and AbortError when `signal` is aborted.
 */
export async function ask(body, reply, signal, changed) {
  const began = performance.now();
  const response = await send(body, signal);
  for await (const chunk of events(response)) {
    reply.ms = performance.now() - began;
    reply.usage = chunk.usage ?? reply.usage;
    for (const choice of chunk.choices) merge(reply, choice);
    changed();
  }
}

const withoutTemplate = new Set(); // names of models

async function send(body, signal) {
  const options = (sent) => ({
    method: "POST", signal, byUser: true, headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...sent, stream: true, stream_options: { include_usage: true } }),
  });
  if (!withoutTemplate.has(body.model)) {
    const response = await api("v1/chat/completions", options(body));
    if (response.ok) return response;
    const error = await errorOf(response);
    if (!error.message.includes("no chat template")) throw error;
    withoutTemplate.add(body.model);
  }
  const response = await api("v1/completions", options(completionOf(body)));
  if (response.ok) return response;
  throw await errorOf(response);
}

/** Return the body of a completion of the messages' texts. */
function completionOf(body) {
  const { messages, top_logprobs, logprobs, tools, tool_choice, chat_template_kwargs, reasoning_effort, ...rest } = body;
  const prompt = messages.map((message) => message.content).join("\n");
  return { max_tokens: 128, ...rest, prompt, ...(logprobs ? { logprobs: top_logprobs } : {}) };
}

function merge(reply, choice) {
  const delta = choice.delta ?? { content: choice.text };
  const said = delta.content || delta.reasoning_content || delta.tool_calls;
  if (said) reply.firstMs ??= reply.ms;
  if ((delta.content || delta.tool_calls) && reply.reasoning) reply.reasoningMs ??= reply.ms - reply.firstMs;
  reply.reasoning += delta.reasoning_content ?? "";
  reply.content += delta.content ?? "";
  for (const part of delta.tool_calls ?? []) mergeCall(reply.toolCalls, part);
  for (const position of positions(choice.logprobs)) reply.logprobs.push(position);
  reply.finish = choice.finish_reason ?? reply.finish;
  reply.seed = choice.seed ?? reply.seed;
}

function mergeCall(calls, part) {
  const call = calls[part.index] ??= { id: "", name: "", arguments: "" };
  call.id ||= part.id ?? "";
  call.name ||= part.function?.name ?? "";
  call.arguments += part.function?.arguments ?? "";
}

/** Return positions as { token, bytes, logprob, top: [{ token, logprob }] }, from either API. */
function positions(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, bytes, logprob, top_logprobs: top }) =>
      ({ token, bytes, logprob, top: top.map((one) => ({ token: one.token, logprob: one.logprob })) }));
  }
  return logprobs.tokens.map((token, place) => ({
    token, bytes: null, logprob: logprobs.token_logprobs[place],
    top: Object.entries(logprobs.top_logprobs[place] ?? {}).map(([name, logprob]) => ({ token: name, logprob })),
  }));
}
