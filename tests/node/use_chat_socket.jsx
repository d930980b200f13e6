// useChat of version 7 on the gateway's WebSocket, and nothing else: no HTTP request is made.
import { Chat, useChat } from "react7";
import { WebSocketChatTransport, lastAssistantMessageIsCompleteWithToolCalls } from "ai7";
import { StrictMode, useEffect } from "react";
import { createRoot } from "react-dom/client";

const query = new URLSearchParams(location.search);
const hash = new URLSearchParams(location.hash.slice(1));
const id = query.get("chat");
const tools = {
  local_time: { description: "Tells the time of day where the user is.", inputSchema: { type: "object", properties: {} } },
};
const stored = (name) => JSON.parse(localStorage.getItem(`chat:${name}`) ?? "[]");
const transport = new WebSocketChatTransport({
  url: "/v1/ui/chat",
  protocols: ["ai-sdk.chat.v1", `bearer.${hash.get("key")}`],
  body: { ...JSON.parse(query.get("body")), ...(query.has("tools") ? { tools } : {}) },
});
const chat = new Chat({
  id,
  transport,
  messages: stored(id),
  sendAutomaticallyWhen: lastAssistantMessageIsCompleteWithToolCalls,
  onToolCall({ toolCall: { toolName, toolCallId } }) {
    chat.addToolOutput({ tool: toolName, toolCallId, output: "noon" });
  },
  onError(problem) {
    if (problem instanceof TypeError) setTimeout(() => chat.resumeStream(), 300);
  },
});

function Page() {
  const { messages, sendMessage, regenerate, status, stop, error } = useChat({ chat, resume: true });
  useEffect(() => localStorage.setItem(`chat:${id}`, JSON.stringify(messages)), [messages]);
  const submit = (event) => {
    event.preventDefault();
    const { prompt, image } = event.target.elements;
    sendMessage({ text: prompt.value, ...(image.files.length ? { files: image.files } : {}) });
  };
  return (
    <>
      {messages.map(({ id, role, parts, metadata }) => (
        <article key={id} data-role={role} data-stream={metadata?.streamId} data-tokens={metadata?.usage?.outputTokens}>
          {parts.map((part, index) => {
            if (part.type === "text") return <span key={index} className="text">{part.text}</span>;
            if (part.type === "file") return <img key={index} src={part.url} alt="" />;
            if (!part.type.startsWith("tool-")) return null;
            return <p key={index} className="tool">{`${part.type} ${part.output ?? part.state}`}</p>;
          })}
        </article>
      ))}
      {error && <p id="error">{error.message}</p>}
      <form onSubmit={submit}>
        <input id="prompt" name="prompt" />
        <input id="image" name="image" type="file" />
        <button id="send">Send</button>
        <button id="stop" type="button" onClick={() => stop()}>Stop</button>
        <button id="regenerate" type="button" onClick={() => regenerate()}>Again</button>
      </form>
      <p id="status">{status}</p>
    </>
  );
}

createRoot(document.getElementById("root")).render(<StrictMode><Page /></StrictMode>);
