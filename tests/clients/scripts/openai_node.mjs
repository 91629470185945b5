// openai for Node: MODE URL KEY; prints what a program sees, as JSON.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const OpenAI = createRequire(`${process.cwd()}/`)("openai");
const [mode, url, key] = process.argv.slice(2);
const client = new OpenAI({
  baseURL: `${url}/v1`,
  apiKey: key || "unused",
  maxRetries: 0,
  timeout: 60_000,
});
const TOOLS = {
  get_weather: ({ city }) => `Rain in ${city}`,
  add: ({ a, b }) => String(a + b),
};
const PROPERTIES = {
  get_weather: { city: { type: "string" } },
  add: { a: { type: "integer" }, b: { type: "integer" } },
};

function schema(name) {
  const properties = PROPERTIES[name];
  const parameters = { type: "object", properties, required: Object.keys(properties) };
  return { name, description: `Calls ${name}.`, parameters };
}

function check(truth, what) {
  if (!truth) throw new Error(what);
}

async function chat() {
  const asked = { model: "demo", messages: [{ role: "user", content: "What is 17 + 25?" }] };
  const whole = await client.chat.completions.create(asked);
  let streamed = "";
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
  }
  const models = [];
  for await (const model of client.models.list()) models.push(model.id);
  return { models, whole: whole.choices[0].message.content, streamed };
}

async function tools(question) {
  const common = {
    model: "agent",
    tools: Object.keys(TOOLS).map((name) => ({ type: "function", function: schema(name) })),
  };

  async function run(ask) {
    const messages = [{ role: "user", content: question }];
    const calls = [];
    for (let turn = 0; turn < 5; turn++) {
      const choice = await ask(messages);
      messages.push(choice.message);
      if (!choice.message.tool_calls?.length) {
        check(choice.finish_reason === "stop", choice.finish_reason);
        return { calls, answer: choice.message.content };
      }
      check(choice.finish_reason === "tool_calls", choice.finish_reason);
      for (const call of choice.message.tool_calls) {
        const given = JSON.parse(call.function.arguments);
        calls.push([call.function.name, given]);
        const content = TOOLS[call.function.name](given);
        messages.push({ role: "tool", tool_call_id: call.id, content });
      }
    }
    throw new Error("no end of calls");
  }

  const whole = await run(
    async (messages) => (await client.chat.completions.create({ messages, ...common })).choices[0],
  );
  const streamed = await run(async (messages) => {
    const stream = client.chat.completions.stream({ messages, ...common });
    return (await stream.finalChatCompletion()).choices[0];
  });
  return { whole, streamed };
}

async function responses(question) {
  const common = {
    model: "agent",
    tools: Object.keys(TOOLS).map((name) => ({ type: "function", strict: false, ...schema(name) })),
    store: false,
  };

  async function run(ask) {
    const input = [{ role: "user", content: question }];
    const calls = [];
    for (let turn = 0; turn < 5; turn++) {
      const answer = await ask(input);
      check(answer.status === "completed", answer.status);
      input.push(...answer.output);
      const called = answer.output.filter((item) => item.type === "function_call");
      if (!called.length) return { calls, answer: answer.output_text };
      for (const call of called) {
        const given = JSON.parse(call.arguments);
        calls.push([call.name, given]);
        const output = TOOLS[call.name](given);
        input.push({ type: "function_call_output", call_id: call.call_id, output });
      }
    }
    throw new Error("no end of calls");
  }

  const whole = await run((input) => client.responses.create({ input, ...common }));
  const streamed = await run((input) => client.responses.stream({ input, ...common }).finalResponse());
  return { whole, streamed };
}

async function main() {
  try {
    if (mode === "chat") return await chat();
    const question = readFileSync(0, "utf8");
    return mode === "responses" ? await responses(question) : await tools(question);
  } catch (error) {
    if (!(error instanceof OpenAI.APIError)) throw error;
    return { error: error.constructor.name, says: error.message };
  }
}

console.log(JSON.stringify(await main()));
