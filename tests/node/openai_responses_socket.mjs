// The official openai package for Node on a WebSocket: lanes side by side, forks, a warm-up, errors of one lane.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { ResponsesWS } from "openai/resources/responses/ws";
import { ResponsesWebSocketSession } from "openai/lib/responses/responses-websocket-session";

const { BASE_URL, KEY, MODEL } = process.env;
const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: KEY, maxRetries: 0 });
const ask = { model: MODEL, input: "Tell me of rivers.", max_output_tokens: 20, seed: 1 };

const socket = new ResponsesWS(client);
const order = [];
socket.on("event", (event) => order.push(event.stream_id));
socket.on("error", () => {}); // errors of a lane are its own
await new Promise((resolve, reject) => {
  socket.socket.once("open", resolve);
  socket.socket.once("error", reject);
});
const session = new ResponsesWebSocketSession(socket, {
  maxLanes: 8,
  maxBufferedEvents: 10_000,
  maxBufferedBytes: 10_000_000,
});
const lanes = ["a", "b", undefined].map((name) => session.lane(name));

for (const lane of lanes) lane.create(ask);
for (const lane of lanes) lane.create({ ...ask, max_output_tokens: 10 });
const firsts = await Promise.all(lanes.map((lane) => lane.finalResponse()));
const seconds = await Promise.all(lanes.map((lane) => lane.finalResponse()));
for (const response of firsts) assert.equal(response.output_text, firsts[0].output_text);
for (const response of seconds) assert.equal(response.usage.output_tokens, 10);
const changes = order.filter((lane, number) => number && lane !== order[number - 1]).length;
assert.ok(changes > 10, `the lanes interleave, ${changes} changes`);
assert.deepEqual([...new Set(order)].sort(), ["a", "b", undefined]);

const [a, b] = lanes;
a.create({ ...ask, store: false, input: "Remember the word copper." });
const parent = await a.finalResponse();
const fork = session.lane("fork");
fork.create({ ...ask, store: false, input: "Which word?", previous_response_id: parent.id });
b.create({ ...ask, store: false, input: "Which word?", previous_response_id: parent.id });
const [one, two] = await Promise.all([fork.finalResponse(), b.finalResponse()]);
assert.equal(one.previous_response_id, parent.id);
assert.equal(one.output_text, two.output_text);
assert.equal(one.usage.input_tokens, two.usage.input_tokens);
assert.ok(one.usage.input_tokens > parent.usage.input_tokens);

const stray = [{ type: "function_call_output", call_id: "call_none", output: "x" }];
fork.create({ ...ask, store: false, input: stray, previous_response_id: parent.id });
await assert.rejects(fork.finalResponse(), ({ error }) => error.status === 400 && error.stream_id === "fork");
a.create({ ...ask, store: false, previous_response_id: parent.id });
assert.equal((await a.finalResponse()).previous_response_id, parent.id);

a.create({ ...ask, input: "You will hear of lakes.", generate: false });
const warm = await a.finalResponse();
assert.deepEqual(warm.output, []);
a.create({ ...ask, previous_response_id: warm.id });
assert.ok((await a.finalResponse()).usage.input_tokens > firsts[0].usage.input_tokens);

b.create({ ...ask, model: "no-such-model" });
await assert.rejects(b.finalResponse(), ({ error }) => error.error.code === "model_not_found");
b.create(ask);
assert.equal((await b.finalResponse()).output_text, firsts[0].output_text);

session.close();
socket.close();
console.log(JSON.stringify({ text: firsts[0].output_text, id: firsts[0].id, output: firsts[0].output }));
