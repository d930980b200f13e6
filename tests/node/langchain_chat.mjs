// LangChain's ChatOpenAI: whole, streamed, its tools, several at once, an abort.
import assert from "node:assert/strict";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";

const { BASE_URL, KEY, MODEL } = process.env;
const ids = [];
const model = new ChatOpenAI({
  model: MODEL,
  apiKey: KEY,
  maxTokens: 20,
  maxRetries: 0,
  modelKwargs: { seed: 1 },
  configuration: {
    baseURL: `${BASE_URL}/v1`,
    fetch: async (...args) => {
      const response = await fetch(...args);
      ids.push(response.headers.get("x-stream-id"));
      return response;
    },
  },
});

const whole = await model.invoke("Tell me of rivers.");
assert.equal(whole.usage_metadata.output_tokens, 20);
assert.equal(whole.response_metadata.finish_reason, "length");

let streamed = "";
let tokens = 0;
for await (const chunk of await model.stream("Tell me of rivers.")) {
  streamed += chunk.content;
  tokens += chunk.usage_metadata?.output_tokens ?? 0;
}
assert.equal(streamed, whole.content);
assert.equal(tokens, 20);

const schema = { type: "object", properties: { city: { type: "string", enum: ["Lima", "Oslo", "Quito"] } }, required: ["city"], additionalProperties: false };
const weather = tool(({ city }) => `dry in ${city}`, { name: "weather", description: "Tells the weather.", schema });
const bound = new ChatOpenAI({ ...model.lc_kwargs, maxTokens: 400 }).bindTools([weather], { tool_choice: "weather", strict: true });
for (const called of [await bound.invoke("Oslo?"), await join(await bound.stream("Oslo?"))]) {
  assert.deepEqual(called.tool_calls.map((call) => call.name), ["weather"]);
  assert.equal(typeof called.tool_calls[0].args.city, "string");
}

const answers = await model.batch(["Tell me of rivers.", "Tell me of towns."]);
assert.equal(answers[0].content, whole.content);

const abort = new AbortController();
const reading = async () => {
  const long = new ChatOpenAI({ ...model.lc_kwargs, maxTokens: 5000 });
  for await (const chunk of await long.stream("Tell me of rivers.", { signal: abort.signal })) if (chunk.content) abort.abort();
};
await assert.rejects(reading());
console.log(JSON.stringify({ text: streamed, aborted: ids.at(-1) }));

async function join(stream) {
  let all;
  for await (const chunk of stream) all = all ? all.concat(chunk) : chunk;
  return all;
}
