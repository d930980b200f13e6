// k6 over the gateway's WebSocket: time to first token, gaps between pieces, whole answers. k6 reads no server-sent
// events while they come, so it cannot time the tokens of an HTTP answer.
//
//   k6 run -e URL=ws://localhost:8080 -e KEY=sk-dev -e MODEL=sim-small --vus 20 --duration 30s examples/load/k6.js
import { check } from "k6";
import { Counter, Trend } from "k6/metrics";
import { WebSocket } from "k6/websockets";

const url = `${__ENV.URL || "ws://localhost:8080"}/v1/stream`;
const ttft = new Trend("ttft", true);
const gap = new Trend("gap", true);
const tokens = new Counter("output_tokens");

export const options = {
  thresholds: { checks: ["rate>0.99"], ttft: ["p(99)<2000"] },
};

export default function () {
  const socket = new WebSocket(url, "tokenstream.v1");
  let began = 0;
  let last = 0;
  let next = 1; // the frame that must come next

  const end = (whole, why) => {
    check(null, { "the answer is whole": () => whole });
    if (!whole) console.error(why);
    socket.close();
  };

  socket.addEventListener("open", () => {
    socket.send(JSON.stringify({ t: "auth", token: __ENV.KEY || "sk-dev" }));
  });
  socket.addEventListener("error", (event) => end(false, event.error));
  socket.addEventListener("message", (event) => {
    const message = JSON.parse(event.data);
    if (message.t === "hi") {
      began = Date.now();
      const body = {
        model: __ENV.MODEL || "sim-small",
        messages: [{ role: "user", content: `Tell me about river ${__VU}.${__ITER}.` }],
        max_tokens: Number(__ENV.TOKENS || 64),
      };
      socket.send(JSON.stringify({ t: "create", ch: 1, dialect: "openai.chat", body }));
    } else if (message.t === "d") {
      const after = message.a === undefined ? message.s - 1 : message.a;
      if (after !== next - 1) return end(false, `frame ${next} is missing`);
      next = message.s + 1;
      if (message.f.some((chunk) => chunk.choices.some((choice) => choice.delta.content))) {
        const now = Date.now();
        if (last) gap.add(now - last);
        else ttft.add(now - began);
        last = now;
      }
    } else if (message.t === "end") {
      if (message.usage) tokens.add(message.usage.output);
      end(message.status === "completed", `the stream ended ${message.status}`);
    } else if (message.t === "error") {
      end(false, `${message.code}: ${message.message}`);
    } else if (message.t === "ping") {
      socket.send(JSON.stringify({ t: "pong" }));
    }
  });
}
