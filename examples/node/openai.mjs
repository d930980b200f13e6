// OpenAI's SDK for Node on stream-gw: a whole answer, and a streamed one with its usage.
import OpenAI from "openai";

const { BASE_URL = "http://127.0.0.1:8080", API_KEY = "sk-dev", MODEL = "sim-small" } = process.env;
const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: API_KEY });
const ask = { model: MODEL, max_tokens: 20, messages: [{ role: "user", content: "Tell me of rivers." }] };

const whole = await client.chat.completions.create(ask);
console.log("whole:", whole.choices[0].message.content);

process.stdout.write("streamed: ");
const stream = await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
for await (const { choices, usage } of stream) {
  process.stdout.write(choices[0]?.delta.content ?? "");
  if (usage) console.log("\ntokens:", usage.completion_tokens);
}
