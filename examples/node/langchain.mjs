// LangChain's ChatOpenAI on stream-gw: a whole answer, and a streamed one with its usage.
import { ChatOpenAI } from "@langchain/openai";

const { BASE_URL = "http://127.0.0.1:8080", API_KEY = "sk-dev", MODEL = "sim-small" } = process.env;
const model = new ChatOpenAI({
  model: MODEL,
  apiKey: API_KEY,
  maxTokens: 20,
  configuration: { baseURL: `${BASE_URL}/v1` },
});

const whole = await model.invoke("Tell me of rivers.");
console.log("whole:", whole.content);

process.stdout.write("streamed: ");
let tokens = 0;
for await (const chunk of await model.stream("Tell me of rivers.")) {
  process.stdout.write(chunk.content);
  tokens += chunk.usage_metadata?.output_tokens ?? 0;
}
console.log("\ntokens:", tokens);
