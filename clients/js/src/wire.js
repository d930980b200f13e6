// Names, cursors and addresses of the wire protocol (docs/protocol.md of stream-gw).

import { GatewayError } from "./errors.js";

export const BEGINNING = "1-0";
export const SUBPROTOCOL = "tokenstream.v1";

export const TERMINAL = new Set(["completed", "cancelled", "failed", "incomplete"]);
const CURSOR = /^(0|[1-9]\d{0,14})-(0|[1-9]\d{0,14})$/;

export function parseCursor(text) {
  const match = CURSOR.exec(text);
  if (!match) throw new GatewayError("cursor_invalid", `${JSON.stringify(text)} is not a cursor such as ${BEGINNING}.`);
  return { n: Number(match[1]), s: Number(match[2]) };
}

/** The value as it is now: a message may be sent later and again, and its caller may have changed the value by then. */
export const copied = (value) => JSON.parse(JSON.stringify(value));

export const epochNumber = (epoch) => Number.parseInt(epoch, 10);

/** The WebSocket address of a gateway given by its http(s) or ws(s) address. */
export function socketUrl(url) {
  const parsed = new URL(url, globalThis.location?.href);
  parsed.protocol = parsed.protocol.replace(/^http/, "ws");
  parsed.hash = parsed.search = "";
  if (!parsed.pathname.endsWith("/v1/stream")) parsed.pathname = `${parsed.pathname.replace(/\/$/, "")}/v1/stream`;
  return parsed.href;
}

export const httpUrl = (socket, path) => socket.replace(/^ws/, "http").replace(/\/v1\/stream$/, path);

/** The text that chunks of openai.chat or openai.completions add to the first choice. */
export function textOf(chunks) {
  let text = "";
  for (const chunk of chunks) {
    const choice = chunk.choices?.find((each) => each.index === 0);
    text += choice?.delta?.content ?? choice?.text ?? "";
  }
  return text;
}

/** The text that items add. Throws at a gap or a reset. */
export async function* texts(items) {
  for await (const item of items) {
    if (item.type === "input") continue;
    if (item.type !== "data") {
      throw new GatewayError(`stream_${item.type}`, `Text already read is no longer the stream's: a ${item.type}.`);
    }
    const text = textOf(item.chunks);
    if (text) yield text;
  }
}
