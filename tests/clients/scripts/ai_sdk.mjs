// The AI SDK's generateObject and tools: MODE URL KEY; prints the answers, as JSON.

import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { generateObject, generateText, streamObject, tool } = require("ai");
const { z } = require("zod");
const [mode, url, key] = process.argv.slice(2);
const provider = (supportsStructuredOutputs) =>
  createOpenAICompatible({
    name: "kiln",
    baseURL: `${url}/v1`,
    apiKey: key || "unused",
    supportsStructuredOutputs,
  });
const schema = z.object({
  city: z.enum(["Oslo", "Rome"]),
  warm: z.boolean(),
  season: z.enum(["summer", "winter"]).nullable(),
});
const model = provider(true)("demo");
const options = {
  model,
  maxOutputTokens: 600,
  temperature: 0,
  maxRetries: 0,
  prompt: "How is the weather in Oslo?",
};

const { object } = await generateObject({ ...options, schema });
const stream = streamObject({ ...options, schema });
let streamed;
for await (const part of stream.partialObjectStream) streamed = part;
const { object: word } = await generateObject({
  ...options,
  output: "enum",
  enum: ["sunny", "rainy"],
});
const weather = tool({ description: "Tell the weather.", inputSchema: schema, strict: true });
const { toolCalls } = await generateText({
  ...options,
  tools: { weather },
  toolChoice: "required",
});
console.log(JSON.stringify({ object, streamed, word, call: toolCalls[0].input }));
