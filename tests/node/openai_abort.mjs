// Three ways to leave a stream with the official openai package; the ids are told, and who reads them finds them cancelled.
import assert from "node:assert/strict";
import OpenAI, { APIUserAbortError } from "openai";

const { BASE_URL, KEY, MODEL } = process.env;
const ids = [];
const client = new OpenAI({
  baseURL: `${BASE_URL}/v1`,
  apiKey: KEY,
  maxRetries: 0,
  fetch: async (...args) => {
    const response = await fetch(...args);
    ids.push(response.headers.get("x-stream-id"));
    return response;
  },
});
const ask = { model: MODEL, messages: [{ role: "user", content: "Tell me of rivers." }], max_tokens: 5000 };

for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) if (chunk.choices[0]?.delta.content) break;

const stream = await client.chat.completions.create({ ...ask, stream: true });
for await (const chunk of stream) if (chunk.choices[0]?.delta.content) stream.controller.abort();

const helper = client.chat.completions.stream(ask);
helper.on("content", () => helper.abort());
await assert.rejects(helper.done(), APIUserAbortError);

console.log(JSON.stringify({ ids }));
