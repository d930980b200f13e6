// Anthropic's SDK for Node on stream-gw: a streamed message, and the number of tokens of its prompt.
import Anthropic from "@anthropic-ai/sdk";

const { BASE_URL = "http://127.0.0.1:8080", API_KEY = "sk-dev", MODEL = "sim-small" } = process.env;
const client = new Anthropic({ baseURL: BASE_URL, apiKey: API_KEY });
const messages = [{ role: "user", content: "Tell me of rivers." }];

const { input_tokens } = await client.messages.countTokens({ model: MODEL, messages });
console.log("prompt tokens:", input_tokens);

process.stdout.write("streamed: ");
const stream = client.messages.stream({ model: MODEL, max_tokens: 20, messages });
stream.on("text", (text) => process.stdout.write(text));
const { usage, stop_reason } = await stream.finalMessage();
console.log("\ntokens:", usage.output_tokens, stop_reason);
