// The official @anthropic-ai/sdk for Node: whole, streamed, the helper, tools, thinking, counts, errors, abort.
import assert from "node:assert/strict";
import Anthropic, { APIUserAbortError, AuthenticationError, BadRequestError, NotFoundError } from "@anthropic-ai/sdk";

const { BASE_URL, KEY, MODEL } = process.env;
const ids = [];
const client = new Anthropic({
  baseURL: BASE_URL,
  apiKey: KEY,
  maxRetries: 0,
  fetch: async (...args) => {
    const response = await fetch(...args);
    ids.push(response.headers.get("x-stream-id"));
    return response;
  },
});
const ask = { model: MODEL, messages: [{ role: "user", content: "Tell me of rivers." }], max_tokens: 20, seed: 1 };

const whole = await client.messages.create(ask);
const text = whole.content[0].text;
assert.equal(whole.stop_reason, "max_tokens");
assert.equal(whole.usage.output_tokens, 20);

let streamed = "";
for await (const event of await client.messages.create({ ...ask, stream: true })) {
  if (event.type === "content_block_delta") streamed += event.delta.text;
}
assert.equal(streamed, text);

const deltas = [];
const helper = client.messages.stream(ask).on("text", (delta) => deltas.push(delta));
const final = await helper.finalMessage();
assert.equal(deltas.join(""), text);
assert.deepEqual(final.content, whole.content);
assert.equal(final.usage.output_tokens, 20);
assert.ok(helper.request_id.startsWith("req_"));

const thoughtful = await client.messages.stream({ ...ask, thinking: { type: "adaptive" } }).finalMessage();
const reasoned = thoughtful.content.map((block) => block.type);

const input_schema = { type: "object", properties: { city: { type: "string", enum: ["Lima", "Oslo", "Quito"] } }, required: ["city"], additionalProperties: false };
const tools = [{ name: "weather", strict: true, input_schema }];
const called = await client.messages.stream({ ...ask, max_tokens: 400, tools, tool_choice: { type: "tool", name: "weather" } }).finalMessage();
assert.equal(called.stop_reason, "tool_use");
assert.equal(called.content[0].name, "weather");
assert.equal(typeof called.content[0].input.city, "string");

const { input_tokens } = await client.messages.countTokens({ model: MODEL, messages: ask.messages });
assert.equal(input_tokens, whole.usage.input_tokens);

const nobody = new Anthropic({ baseURL: BASE_URL, apiKey: "sk-nobody", maxRetries: 0 });
await assert.rejects(nobody.messages.create({ ...ask, stream: true }), AuthenticationError);
await assert.rejects(client.messages.create({ ...ask, model: "no-such-model" }), NotFoundError);
await assert.rejects(client.messages.create({ ...ask, messages: [] }), BadRequestError);
const models = [];
for await (const model of client.models.list()) models.push(model.id);
assert.ok(models.includes(MODEL));

const left = client.messages.stream({ ...ask, max_tokens: 5000 });
left.on("text", () => left.abort());
await assert.rejects(left.done(), APIUserAbortError);
console.log(JSON.stringify({ text, reasoned, aborted: ids.at(-1) }));
