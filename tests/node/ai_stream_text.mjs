// streamText of the official ai package with its OpenAI-compatible and Anthropic providers: text, tools, abort.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { jsonSchema, stepCountIs, streamText, tool } from "ai";

const { BASE_URL, KEY, MODEL } = process.env;
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
  assert.ok(text.split(" ").length > 5);
  assert.equal((await plain.usage).outputTokens, 20);
  assert.equal(await plain.finishReason, "length");

  const inputs = [];
  const weather = tool({
    description: "Tells the weather.",
    inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } } }),
    execute: async (input) => { inputs.push(input); return { degrees: 9 }; },
  });
  const agent = streamText({ ...ask, maxOutputTokens: 60, prompt: "What is the weather?", tools: { weather }, stopWhen: stepCountIs(3) });
  assert.ok((await agent.text).length > 0);
  const steps = await agent.steps;
  assert.equal(steps.length, 2);
  assert.equal(steps[0].finishReason, "tool-calls");
  assert.equal(typeof inputs[0].city, "string");

  const controller = new AbortController();
  const aborted = streamText({ ...ask, maxOutputTokens: 5000, prompt: "Tell me of rivers.", abortSignal: controller.signal });
  for await (const part of aborted.textStream) if (part) controller.abort();
  told[name] = { aborted: ids.at(-1) };
}
console.log(JSON.stringify(told));
