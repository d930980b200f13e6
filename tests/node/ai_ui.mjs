// The official ai package on the gateway's chats, without a framework: text, reasoning, tools, errors, resume, stop.
import assert from "node:assert/strict";

const { BASE_URL, KEY, MODEL, PACKAGE } = process.env;
const { AbstractChat, DefaultChatTransport, lastAssistantMessageIsCompleteWithToolCalls, readUIMessageStream } = await import(PACKAGE);
const api = `${BASE_URL}/v1/ui/chat`;
const headers = { Authorization: `Bearer ${KEY}` };
const settings = { model: MODEL, maxOutputTokens: 20, seed: 1, ignore_eos: true };
const question = { id: "u1", role: "user", parts: [{ type: "text", text: "Tell me of rivers." }] };

const streams = [];
function transportOf(body = {}, more = {}) {
  return new DefaultChatTransport({
    api, headers, body: { ...settings, ...body }, ...more,
    fetch: async (...args) => {
      const response = await fetch(...args);
      streams.push(response.headers.get("x-stream-id"));
      return response;
    },
  });
}
class Chat extends AbstractChat {
  constructor(init, messages = []) {
    super({ ...init, state: {
      status: "ready", error: undefined, messages,
      pushMessage(message) { this.messages = [...this.messages, message]; },
      popMessage() { this.messages = this.messages.slice(0, -1); },
      replaceMessage(at, message) { this.messages = this.messages.with(at, message); },
      snapshot: structuredClone,
    } });
  }
}
const textOf = (message) => message.parts.filter((part) => part.type === "text").map((part) => part.text).join("");
const name = (what) => `${what}-${PACKAGE}-${process.pid}`;

// readUIMessageStream on the transport
const stream = await transportOf().sendMessages({ chatId: name("read"), messages: [question], trigger: "submit-message" });
let message;
for await (message of readUIMessageStream({ stream, terminateOnError: true }));
const text = textOf(message);
assert.equal(message.metadata.usage.outputTokens, 20);
assert.equal(message.metadata.streamId, streams[0]);

// A chat, its second turn, and the answer made again
const finished = [];
const chat = new Chat({ id: name("chat"), transport: transportOf(), onFinish: (told) => finished.push(told.finishReason) });
await chat.sendMessage({ text: "Tell me of rivers." });
assert.equal(textOf(chat.lastMessage), text);
await chat.sendMessage({ text: "And of lakes?" });
assert.equal(chat.messages.length, 4);
const second = chat.lastMessage.id;
await chat.regenerate();
assert.equal(chat.messages.length, 4);
assert.notEqual(chat.lastMessage.id, second);
assert.deepEqual(finished, ["length", "length", "length"]);

// Reasoning
const thoughtful = new Chat({ id: name("think"), transport: transportOf({ chat_template_kwargs: { enable_thinking: true } }) });
await thoughtful.sendMessage({ text: "Tell me of rivers." });
assert.deepEqual(thoughtful.lastMessage.parts.map((part) => part.type), ["step-start", "reasoning", "text"]);

// A tool of the page: its result goes on in the same message
const tools = { weather: { description: "Tells the weather.", inputSchema: { type: "object", properties: { city: { type: "string" } } } } };
const calls = [];
const agent = new Chat({
  id: name("tools"), transport: transportOf({ tools, maxOutputTokens: 40 }),
  sendAutomaticallyWhen: lastAssistantMessageIsCompleteWithToolCalls,
  onToolCall({ toolCall }) {
    calls.push(toolCall);
    agent.addToolOutput({ tool: toolCall.toolName, toolCallId: toolCall.toolCallId, output: { degrees: 9 } });
  },
});
await agent.sendMessage({ text: "What is the weather?" });
const until = async (done) => { for (const end = Date.now() + 20_000; !done(); await new Promise((next) => setTimeout(next, 20))) assert.ok(Date.now() < end); };
await until(() => agent.status === "ready" && agent.lastMessage.parts.some((part) => part.type === "text"));
assert.equal(agent.messages.length, 2);
assert.equal(calls.length, 1);
assert.equal(typeof calls[0].input.city, "string");
const kinds = agent.lastMessage.parts.map((part) => part.type);
assert.deepEqual(kinds, ["step-start", "tool-weather", "step-start", "text"]);
// Another page, which kept the message, resumes it whole
const page = new Chat({ id: name("tools"), transport: transportOf(), onToolCall: () => assert.fail("run again") }, structuredClone(agent.messages));
await page.resumeStream();
assert.deepEqual(page.messages, agent.messages);

// Errors: of the request, and of a chat that has nothing to resume
const nobody = new Chat({ id: name("nobody"), transport: transportOf({}, { headers: { Authorization: "Bearer sk-nobody" } }) });
await nobody.sendMessage({ text: "Hi" });
assert.equal(nobody.status, "error");
assert.equal(JSON.parse(nobody.error.message).error.code, "invalid_api_key");
const failing = new Chat({ id: name("late"), transport: transportOf({ deadline_s: 0.3, maxOutputTokens: 5000 }) });
await failing.sendMessage({ text: "Hi" });
assert.equal(failing.status, "error");
assert.match(failing.error.message, /0\.3|deadline/i);
assert.ok(textOf(failing.lastMessage).length > 0);
assert.equal(await transportOf().reconnectToStream({ chatId: name("never") }), null);

// A page that leaves and comes back; then a stop, which ends the stream itself
const first = new Chat({ id: name("stop"), transport: transportOf({ maxOutputTokens: 5000 }) });
const sending = first.sendMessage({ text: "Tell me of rivers." });
await until(() => first.lastMessage?.role === "assistant" && textOf(first.lastMessage).length > 20);
await first.stop();
await sending;
const back = new Chat({ id: name("stop"), transport: transportOf() }, structuredClone(first.messages));
const resuming = back.resumeStream();
await until(() => back.status === "streaming" && textOf(back.lastMessage).length > textOf(first.lastMessage).length);
const { streamId } = back.lastMessage.metadata;
const stopped = await fetch(`${api}/${encodeURIComponent(name("stop"))}?stream=${streamId}`, { method: "DELETE", headers });
assert.equal((await stopped.json()).result, "accepted");
await resuming;
assert.equal(back.status, "ready");
assert.equal(back.messages.length, 2);
assert.equal(await transportOf().reconnectToStream({ chatId: name("stop") }), null);
console.log(JSON.stringify({ text, stopped: streamId, said: textOf(back.lastMessage) }));
