// streamText of the official ai package with its OpenAI-compatible and Anthropic providers: text, tools, abort.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { jsonSchema, stepCountIs, streamText, tool } from "ai";

const { BASE_URL, KEY, MODEL, NOISE } = process.env; // NOISE: a model whose arguments fit a schema only if it is strict
globalThis.AI_SDK_LOG_WARNINGS = false; // Anthropic's provider has no seed
const ids = [];
const watched = async (...args) => {
  const response = await fetch(...args);
  ids.push(response.headers.get("x-stream-id"));
  return response;
};
const models = {
  openai: createOpenAICompatible({ name: "gateway", baseURL: `${BASE_URL}/v1`, apiKey: KEY, includeUsage: true, fetch: watched })(MODEL),
  anthropic: createAnthropic({ baseURL: `${BASE_URL}/v1`, apiKey: KEY, fetch: watched })(MODEL),
};
const told = {};
for (const [name, model] of Object.entries(models)) {
  const ask = { model, seed: 1, maxOutputTokens: 20, maxRetries: 0, onError: () => {} };
  const plain = streamText({ ...ask, prompt: "Tell me of rivers." });
  const text = await plain.text;
  assert.ok(text.length > 5);
  assert.equal((await plain.usage).outputTokens, 20);
  assert.equal(await plain.finishReason, "length");

  told[name] = { aborted: await abortedStream(ask) };
  if (NOISE && name !== "openai") continue;
  const inputs = [];
  const weather = tool({
    description: "Tells the weather.",
    strict: name === "openai" || undefined, // Anthropic's provider knows it of Anthropic's models alone
    inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string", enum: ["Lima", "Oslo", "Quito"] } }, required: ["city"], additionalProperties: false }),
    execute: async (input) => { inputs.push(input); return { degrees: 9 }; },
  });
  const agent = streamText({
    ...ask, maxOutputTokens: 400, prompt: "What is the weather?", tools: { weather }, stopWhen: stepCountIs(3),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : { type: "tool", toolName: "weather" } }),
  });
  assert.ok((await agent.text).length > 0);
  const steps = await agent.steps;
  assert.equal(steps.length, 2);
  assert.deepEqual(steps[0].toolCalls.map((call) => call.toolName), ["weather"]);
  assert.equal(typeof inputs[0].city, "string");
}
console.log(JSON.stringify(told));

async function abortedStream(ask) {
  const controller = new AbortController();
  const aborted = streamText({ ...ask, maxOutputTokens: 5000, prompt: "Tell me of rivers.", abortSignal: controller.signal });
  for await (const part of aborted.textStream) if (part) controller.abort();
  return ids.at(-1);
}
