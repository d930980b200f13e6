// The shortest page: useChat with a transport and resume, which keeps nothing.
import { useChat } from "@ai-sdk/react";
import { DefaultChatTransport } from "ai";
import { createRoot } from "react-dom/client";

const query = new URLSearchParams(location.search);
const hash = new URLSearchParams(location.hash.slice(1));
const transport = new DefaultChatTransport({
  api: "/v1/ui/chat",
  headers: { Authorization: `Bearer ${hash.get("key")}` },
  body: JSON.parse(query.get("body")),
});

function Page() {
  const { messages, sendMessage, status } = useChat({ id: query.get("chat"), transport, resume: true });
  const submit = (event) => {
    event.preventDefault();
    sendMessage({ text: event.target.elements.prompt.value });
  };
  return (
    <>
      {messages.map(({ id, role, parts }) => (
        <article key={id} data-role={role}>
          {parts.map((part, index) => part.type === "text" && <span key={index} className="text">{part.text}</span>)}
        </article>
      ))}
      <form onSubmit={submit}><input id="prompt" name="prompt" /><button id="send">Send</button></form>
      <p id="status">{status}</p>
    </>
  );
}

createRoot(document.getElementById("root")).render(<Page />);
