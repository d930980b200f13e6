// The official openai package for Node: responses whole, streamed, the helper, tools, background, resume, cancel, errors.
import assert from "node:assert/strict";
import OpenAI, { AuthenticationError, BadRequestError, NotFoundError } from "openai";

const { BASE_URL, KEY, MODEL } = process.env;
const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: KEY, maxRetries: 0 });
const ask = { model: MODEL, input: "Tell me of rivers.", max_output_tokens: 20, seed: 1 };

const whole = await client.responses.create(ask);
const text = whole.output_text;
assert.equal(whole.status, "incomplete");
assert.equal(whole.usage.output_tokens, 20);

let streamed = "";
const numbers = [];
for await (const event of await client.responses.create({ ...ask, stream: true })) {
  numbers.push(event.sequence_number);
  if (event.type === "response.output_text.delta") streamed += event.delta;
}
assert.equal(streamed, text);
assert.deepEqual(numbers, numbers.map((_, number) => number));

const deltas = [];
const helper = client.responses.stream(ask).on("response.output_text.delta", (event) => deltas.push(event.delta));
const final = await helper.finalResponse();
assert.equal(deltas.join(""), text);
assert.equal(final.output_text, text);
assert.equal(final.usage.output_tokens, 20);

const thoughtful = await client.responses.stream({ ...ask, reasoning: { effort: "low" } }).finalResponse();
const reasoned = thoughtful.output.map((item) => item.type);

const parameters = { type: "object", properties: { city: { type: "string", enum: ["Lima", "Oslo", "Quito"] } }, required: ["city"], additionalProperties: false };
const tools = [{ type: "function", name: "weather", parameters, strict: true }];
const more = { ...ask, max_output_tokens: 100 };
const most = { ...ask, max_output_tokens: 400 };
const called = await client.responses.stream({ ...most, tools, tool_choice: { type: "function", name: "weather" } }).finalResponse();
const [call] = called.output;
assert.equal(called.status, "completed");
assert.equal(call.name, "weather");
assert.equal(typeof JSON.parse(call.arguments).city, "string");
const result = { type: "function_call_output", call_id: call.call_id, output: "Rain" };
const answered = await client.responses.create({ ...ask, input: [result], previous_response_id: called.id, tools });
assert.ok(answered.output_text);

const format = { type: "json_schema", name: "city", schema: parameters, strict: true };
const formed = await client.responses.stream({ ...most, text: { format } }).finalResponse();
assert.equal(typeof JSON.parse(formed.output_text).city, "string");

const events = [];
for await (const event of await client.responses.create({ ...more, background: true, stream: true })) {
  events.push(event);
  if (events.length === 6) break;
}
const id = events[0].response.id;
for await (const event of await client.responses.retrieve(id, { stream: true, starting_after: 5 })) events.push(event);
assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, number) => number));
assert.equal(events.at(-1).type, "response.incomplete");
const again = await client.responses.stream({ response_id: id, starting_after: 3 }).finalResponse();
assert.equal(again.output_text, events.at(-1).response.output[0].content[0].text);
assert.deepEqual((await client.responses.retrieve(id)).output, events.at(-1).response.output);

const long = { ...more, max_output_tokens: 5000, ignore_eos: true };
const running = await client.responses.create({ ...long, background: true });
assert.equal(running.status, "queued");
assert.equal((await client.responses.cancel(running.id)).status, "cancelled");
await client.responses.delete(running.id);
await assert.rejects(client.responses.retrieve(running.id), NotFoundError);

const nobody = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: "sk-nobody", maxRetries: 0 });
await assert.rejects(nobody.responses.create({ ...ask, stream: true }), AuthenticationError);
await assert.rejects(client.responses.create({ ...ask, model: "no-such-model" }), NotFoundError);
await assert.rejects(client.responses.create({ ...ask, tools: [{ type: "web_search" }] }), BadRequestError);

const left = client.responses.stream(long);
let aborted;
left.on("response.created", (event) => (aborted = event.response.id));
left.on("response.output_text.delta", () => left.abort());
await assert.rejects(left.done());
console.log(JSON.stringify({ text, reasoned, aborted }));
