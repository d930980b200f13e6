// What the official accumulators of ai 6 and ai 7 build of UI message streams: one JSON line in, one out.
import { createInterface } from "node:readline";
import * as v6 from "ai";
import * as v7 from "ai7";

const QUESTION = { id: "u1", role: "user", parts: [{ type: "text", text: "?" }] };

/** A chat without a framework, whose gateway answers with canned bytes; POST is cut after `cut` bytes. */
function chatOf(ai, body, { cut, messages }) {
  class Chat extends ai.AbstractChat {
    constructor(init, state) {
      super({ ...init, state });
      this.kept = state;
    }
  }
  const state = {
    status: "ready",
    error: undefined,
    messages,
    pushMessage(message) { this.messages = [...this.messages, message]; },
    popMessage() { this.messages = this.messages.slice(0, -1); },
    replaceMessage(at, message) { this.messages = this.messages.with(at, message); },
    snapshot: structuredClone,
  };
  const told = { finishReason: undefined, calls: [] };
  const transport = new ai.DefaultChatTransport({
    api: "http://gateway/v1/ui/chat",
    fetch: async (_, { method }) => new Response(method === "POST" ? cutOff(body, cut) : body),
  });
  const onFinish = ({ finishReason }) => { told.finishReason = finishReason; };
  const onToolCall = ({ toolCall }) => { told.calls.push(toolCall.toolCallId); };
  return [new Chat({ id: "c", transport, onFinish, onToolCall, onError: () => {} }, state), told];
}

function cutOff(body, cut) {
  const bytes = new TextEncoder().encode(body);
  if (cut === undefined) return bytes;
  let sent = false;
  return new ReadableStream({
    pull(controller) {
      if (sent) return controller.error(new TypeError("network error"));
      sent = true;
      if (cut > 0) controller.enqueue(bytes.slice(0, cut));
      else controller.error(new TypeError("network error"));
    },
  }, { highWaterMark: 0 });
}

async function whole(ai, body, before = []) {
  const [chat, told] = chatOf(ai, body, { messages: [QUESTION, ...before] });
  await (before.length ? chat.sendMessage() : chat.sendMessage(undefined, {}));
  return { messages: chat.messages.slice(1), ...told, status: chat.status, error: chat.error?.message };
}

/**
 * The same stream cut at each event, or only at the end of the body, and resumed: in the same page, in a fresh one, and
 * in one that kept the half.
 */
async function resumed(ai, body, replay, before, atTheEnd) {
  const seen = new Set();
  const length = (text) => new TextEncoder().encode(text).length;
  const cuts = [0];
  for (const event of body.split(/(?<=\n\n)/)) cuts.push(cuts.at(-1) + length(event));
  for (const cut of atTheEnd ? cuts.slice(-1) : cuts.slice(0, -1)) {
    const [chat] = chatOf(ai, body, { messages: [QUESTION, ...before], cut });
    await chat.sendMessage();
    const half = structuredClone(chat.messages);
    for (const messages of [undefined, [QUESTION, ...before], half]) {
      const [page] = messages === undefined ? [chat] : chatOf(ai, replay, { messages });
      if (messages === undefined) page.transport.fetch = async () => new Response(replay);
      await page.resumeStream();
      seen.add(JSON.stringify([page.status, page.messages.slice(1)]));
    }
  }
  return [...seen].map((text) => JSON.parse(text));
}

async function readMessages(ai, body) {
  const transport = new ai.DefaultChatTransport({ api: "http://gateway/v1/ui/chat", fetch: async () => new Response(body) });
  const stream = await transport.reconnectToStream({ chatId: "c" });
  const errors = [];
  let last;
  for await (const message of ai.readUIMessageStream({ stream, onError: (error) => errors.push(String(error)) })) last = message;
  return { message: last, errors };
}

for await (const line of createInterface({ input: process.stdin })) {
  const { version, body, replay, before = [], how, atTheEnd } = JSON.parse(line);
  const ai = version === 7 ? v7 : v6;
  const found = how === "resumed" ? await resumed(ai, body, replay ?? body, before, atTheEnd)
    : how === "read" ? await readMessages(ai, body)
    : await whole(ai, body, before);
  console.log(JSON.stringify(found));
}
