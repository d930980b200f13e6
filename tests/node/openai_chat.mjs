// The official openai package for Node: whole, streamed, the helper, several choices, tools, errors.
import assert from "node:assert/strict";
import OpenAI, { AuthenticationError, BadRequestError, NotFoundError } from "openai";

const { BASE_URL, KEY, MODEL } = process.env;
const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: KEY, maxRetries: 0 });
const ask = { model: MODEL, messages: [{ role: "user", content: "Tell me of rivers." }], max_tokens: 20, seed: 1 };

const whole = await client.chat.completions.create(ask);
const text = whole.choices[0].message.content;
assert.equal(whole.choices[0].finish_reason, "length");
assert.equal(whole.usage.completion_tokens, 20);

let streamed = "";
const usages = [];
const stream = await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  if (chunk.usage) usages.push(chunk.usage);
}
assert.equal(streamed, text);
assert.deepEqual(usages.map((usage) => usage.completion_tokens), [20]);

const deltas = [];
const helper = client.chat.completions.stream({ ...ask, stream_options: { include_usage: true } });
helper.on("content", (delta) => deltas.push(delta));
const final = await helper.finalChatCompletion();
assert.equal(deltas.join(""), text);
assert.equal(final.choices[0].message.content, text);
assert.equal((await helper.totalUsage()).completion_tokens, 20);

const texts = ["", ""];
for await (const chunk of await client.chat.completions.create({ ...ask, n: 2, stream: true })) {
  for (const choice of chunk.choices) texts[choice.index] += choice.delta.content ?? "";
}
const two = await client.chat.completions.stream({ ...ask, n: 2 }).finalChatCompletion();
assert.deepEqual(two.choices.map((choice) => choice.message.content), texts);

const parameters = { type: "object", properties: { city: { type: "string", enum: ["Lima", "Oslo", "Quito"] } }, required: ["city"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "weather", strict: true, parameters } }];
const calls = client.chat.completions.stream({ ...ask, max_tokens: 400, tools, tool_choice: { type: "function", function: { name: "weather" } } });
const call = await calls.finalFunctionToolCall();
assert.equal(call.name, "weather");
assert.equal(typeof JSON.parse(call.arguments).city, "string");

const completion = { model: MODEL, prompt: "Once upon a time", max_tokens: 12, seed: 3 };
const told = await client.completions.create(completion);
let tale = "";
for await (const chunk of await client.completions.create({ ...completion, stream: true })) tale += chunk.choices[0]?.text ?? "";
assert.equal(tale, told.choices[0].text);

const nobody = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: "sk-nobody", maxRetries: 0 });
await assert.rejects(nobody.models.list(), AuthenticationError);
await assert.rejects(client.chat.completions.create({ ...ask, model: "no-such-model", stream: true }), NotFoundError);
await assert.rejects(client.chat.completions.create({ ...ask, messages: [] }), BadRequestError);
assert.ok((await client.models.list()).data.some((model) => model.id === MODEL));
console.log(JSON.stringify({ text }));
