// The official openai package for Node: custom tools, item_reference, truncation, compaction before the answer.
import assert from "node:assert/strict";
import OpenAI, { BadRequestError, NotFoundError } from "openai";

const { BASE_URL, KEY, MODEL, SHORT } = process.env;
const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: KEY, maxRetries: 0 });
const user = (content) => ({ role: "user", content });

// Custom tools: the model's call is free text, and its output is an item of its own type
const tools = [{ type: "custom", name: "shell", description: "Runs a command." }];
const ask = { model: MODEL, input: [user("List the files.")], tools, seed: 1 };
const inputs = [];
const called = await client.responses
  .stream({ ...ask, tool_choice: { type: "custom", name: "shell" } })
  .on("event", (event) => event.type.startsWith("response.custom_tool_call_input") && inputs.push(event))
  .finalResponse();
const call = called.output.find((item) => item.type === "custom_tool_call");
assert.equal(called.status, "completed");
assert.equal(call.name, "shell");
assert.equal(typeof call.input, "string");
assert.equal(inputs.filter((event) => event.delta !== undefined).map((event) => event.delta).join(""), call.input);
assert.equal(inputs.at(-1).input, call.input);
assert.deepEqual(called.tools, [{ ...tools[0], format: { type: "text" } }]);
const output = { type: "custom_tool_call_output", call_id: call.call_id, output: "a.txt" };
const limited = { model: MODEL, tools, tool_choice: "none", max_output_tokens: 20, seed: 1 };
const continued = await client.responses.create({ ...limited, input: [output], previous_response_id: called.id });
assert.ok(continued.output_text);
const byValue = await client.responses.create({ ...limited, input: [...ask.input, ...called.output, output] });
assert.equal(byValue.output_text, continued.output_text);
const unknown = { ...output, call_id: "call_unknown" };
await assert.rejects(client.responses.create({ ...limited, input: [unknown] }), BadRequestError);

// References: items of stored responses stand where their ids do
const asked = (await client.responses.inputItems.list(called.id)).data[0];
const references = [asked, ...called.output].map((item) => ({ type: "item_reference", id: item.id }));
const byReference = await client.responses.create({ ...limited, input: [...references, output] });
assert.equal(byReference.output_text, continued.output_text);
const missing = { type: "item_reference", id: `msg_${"0".repeat(32)}` };
await assert.rejects(
  client.responses.create({ ...limited, input: [missing, user("And?")] }),
  (error) => error instanceof NotFoundError && error.code === "item_not_found",
);

// Truncation: a conversation beyond the context is refused, or loses its oldest turns
const turns = (count) =>
  Array.from({ length: count }, (_, number) => [
    user(`Question ${number}: ${"what ".repeat(40)}`),
    { role: "assistant", content: `Answer ${number}: ${"that ".repeat(40)}` },
  ]).flat();
const items = [...turns(40), user("And?")];
const long = { model: SHORT, input: items, max_output_tokens: 20, seed: 1 };
for (const truncation of [undefined, "disabled"]) {
  await assert.rejects(
    client.responses.create({ ...long, truncation }),
    (error) => error instanceof BadRequestError && error.code === "context_length_exceeded",
  );
}
const cut = await client.responses.create({ ...long, truncation: "auto" });
assert.equal(cut.truncation, "auto");
assert.ok(cut.truncated_items > 40 && cut.truncated_items < items.length - 1);
const deltas = [];
const streamed = await client.responses
  .stream({ ...long, truncation: "auto" })
  .on("response.output_text.delta", (event) => deltas.push(event.delta))
  .finalResponse();
assert.equal(streamed.output_text, cut.output_text);
assert.equal(deltas.join(""), cut.output_text);
assert.equal(streamed.truncated_items, cut.truncated_items);

// Compaction: the response begins with an item that stands for all items before it
const context_management = [{ type: "compaction", compact_threshold: 300 }];
const short = { ...long, input: [...turns(5), user("And?")], context_management };
const compacted = await client.responses.stream(short).finalResponse();
assert.deepEqual(compacted.output.map((item) => item.type), ["compaction", "message"]);
const after = { model: SHORT, max_output_tokens: 20, seed: 1 };
const byId = await client.responses.create({ ...after, previous_response_id: compacted.id, input: "Go on." });
const whole = await client.responses.create({ ...after, input: [...short.input, ...compacted.output, user("Go on.")] });
assert.equal(whole.output_text, byId.output_text);
assert.equal(whole.usage.input_tokens, byId.usage.input_tokens);

console.log(JSON.stringify({ text: cut.output_text, kept: items.slice(cut.truncated_items) }));
