// The AI SDK on stream-gw, by its provider for OpenAI-compatible servers.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";

const { BASE_URL = "http://127.0.0.1:8080", API_KEY = "sk-dev", MODEL = "sim-small" } = process.env;
const gateway = createOpenAICompatible({
  name: "stream-gw",
  baseURL: `${BASE_URL}/v1`,
  apiKey: API_KEY,
  includeUsage: true,
});

const answer = streamText({ model: gateway(MODEL), prompt: "Tell me of rivers.", maxOutputTokens: 20 });
process.stdout.write("streamed: ");
for await (const text of answer.textStream) process.stdout.write(text);
const { outputTokens } = await answer.usage;
console.log("\ntokens:", outputTokens, await answer.finishReason);
