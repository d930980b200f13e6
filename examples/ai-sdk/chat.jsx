// A chat whose server is a gateway alone: it translates the messages, keeps the answer, resumes it and stops it.
import { Chat, useChat } from "@ai-sdk/react";
import { DefaultChatTransport, lastAssistantMessageIsCompleteWithToolCalls } from "ai";
import { StrictMode, useEffect, useState } from "react";
import { createRoot } from "react-dom/client";

const query = new URLSearchParams(location.search);
const GATEWAY = query.get("gateway") ?? location.origin;
const API = `${GATEWAY}/v1/ui/chat`;
// Settings of the model, for example ?body={"model":"sim-small","temperature":0.2}
const BODY = JSON.parse(query.get("body") ?? "{}");
const RETRY_MS = 500;

// A capability token that your own backend mints (POST /v1/tokens); an API key only while you develop
const hash = new URLSearchParams(location.hash.slice(1));
if (hash.has("key")) {
  sessionStorage.setItem("key", hash.get("key"));
  history.replaceState(null, "", location.pathname + location.search);
}
const headers = { Authorization: `Bearer ${sessionStorage.getItem("key")}` };

// The page keeps its messages; an app would keep them in its database
const stored = (id) => JSON.parse(localStorage.getItem(`chat:${id}`) ?? "[]");

const tools = {
  local_time: { description: "Tells the time of day where the user is.", inputSchema: { type: "object", properties: {} } },
};

const transport = new DefaultChatTransport({ api: API, headers, body: query.has("tools") ? { tools, ...BODY } : BODY });

// A Chat of its own, because useChat({ transport }) hides from the chat that a resumed answer begins anew: an answer that
// resumes within the page would be shown twice
const id = query.get("chat") ?? "example";
const chat = new Chat({
  id,
  transport,
  messages: stored(id),
  sendAutomaticallyWhen: lastAssistantMessageIsCompleteWithToolCalls,
  onToolCall({ toolCall: { toolName, toolCallId } }) {
    if (toolName === "local_time") {
      chat.addToolOutput({ tool: toolName, toolCallId, output: new Date().toLocaleTimeString() });
    }
  },
  onError(problem) {
    // The network or a gateway is gone: any other gateway has the answer
    if (problem instanceof TypeError) setTimeout(() => chat.resumeStream(), RETRY_MS);
  },
});

function Page() {
  const [text, setText] = useState("");
  // resume: reload the page in the middle of an answer, and it goes on
  const { messages, sendMessage, regenerate, status, stop, error } = useChat({ chat, resume: true });
  const busy = status === "submitted" || status === "streaming";

  useEffect(() => localStorage.setItem(`chat:${id}`, JSON.stringify(messages)), [messages]);

  async function stopAnswer() {
    // stop() alone ends only this page's request. With the stream's id a late click does not end the next answer.
    const last = messages.at(-1);
    const stream = last?.role === "assistant" && status === "streaming" ? last.metadata?.streamId : undefined;
    const url = `${API}/${encodeURIComponent(id)}${stream ? `?stream=${stream}` : ""}`;
    await fetch(url, { method: "DELETE", headers });
    await stop();
  }

  function submit(event) {
    event.preventDefault();
    if (text.trim()) sendMessage({ text });
    setText("");
  }

  return (
    <>
      {messages.map((message) => (
        <article key={message.id} id={message.id} data-role={message.role}>
          {message.parts.map((part, index) => <Part key={index} part={part} />)}
        </article>
      ))}
      {error && <p id="error">{error.message}</p>}
      <form onSubmit={submit}>
        <input id="prompt" value={text} onChange={(event) => setText(event.target.value)} aria-label="Message" />
        {busy ? (
          <button id="stop" type="button" onClick={stopAnswer}>Stop</button>
        ) : (
          <button id="send">Send</button>
        )}
        <button id="regenerate" type="button" disabled={busy || !messages.length} onClick={() => regenerate()}>
          Again
        </button>
      </form>
      <p id="status">{status}</p>
    </>
  );
}

function Part({ part }) {
  if (part.type === "text") return <span className="text">{part.text}</span>;
  if (part.type === "reasoning") return <p className="reasoning">{part.text}</p>;
  if (part.type.startsWith("tool-")) {
    return <p className="tool">{`${part.type.slice(5)}(${JSON.stringify(part.input)}) → ${part.output ?? part.state}`}</p>;
  }
  return null;
}

createRoot(document.getElementById("root")).render(<StrictMode><Page /></StrictMode>);
