// What the page says about an answer below its text: why it ended, how fast it was, and what happened on the way.

import { isRunning } from "./store.js";

const FINISHES = {
  length: "Ended at the length limit",
  content_filter: "Ended by content moderation",
  tool_calls: "Ended with a tool call",
};
const BLOCKED = "Requests reach the gateway, but WebSockets do not: a proxy on the way does not pass them. Tell its administrator.";
const LINKS = {
  blocked: BLOCKED,
  offline: "You are offline. The text so far is kept here, and the rest follows when the network is back.",
  reconnecting: "The connection was lost. The rest of the answer follows once it is back.",
};
const UNSENT = {
  blocked: BLOCKED,
  offline: "You are offline. Your message is sent when the network is back.",
  reconnecting: "The connection was lost. Your message is sent once it is back.",
};

/** Why the answer ended, where that needs saying. Empty: it is complete, or runs, or failed. */
export function ending({ status, finish, stopReason, usage }) {
  if (status === "cancelled") {
    const tokens = usage?.output;
    return tokens === undefined ? "Stopped" : `Stopped at token ${tokens}`;
  }
  if (stopReason === "budget" && !["starting", "running", "failed"].includes(status)) return "Ended by a budget of your plan";
  if (status === "incomplete") return FINISHES[finish] ?? "Cut short";
  return status === "completed" ? (FINISHES[finish] ?? "") : "";
}

/** What keeps a running answer from growing; `link` is the connection's state, `place` where the request waits. */
export function hindrance(message, link, place) {
  if (!isRunning(message)) return "";
  return (message.status === "starting" ? UNSENT : LINKS)[link] ?? (place ? waiting(place) : "");
}

function waiting({ position, of, warmingS }) {
  const starts = warmingS === null ? "" : ` A replica is starting; it needs about ${Math.max(warmingS, 1)} s.`;
  return `Waiting for a free replica: ${position} of ${of} in the queue.${starts}`;
}

const seconds = (ms) => `${(ms / 1000).toFixed(ms < 9950 ? 2 : 0)} s`;

/** Figures of an ended answer, as far as they were measured or told. */
export function figures({ status, finish, stopReason, usage, firstMs, perS }) {
  const told = [];
  if (status === "completed" && finish === "stop") told.push(typeof stopReason === "string" ? "Complete, at a stop sequence" : "Complete");
  const tokens = usage?.output;
  if (tokens !== undefined && status !== "cancelled") told.push(`${tokens.toLocaleString("en")} ${tokens === 1 ? "token" : "tokens"}`);
  if (perS) told.push(`${perS < 10 ? perS.toFixed(1) : Math.round(perS)} tokens/s`);
  if (firstMs !== undefined) told.push(`first token ${seconds(firstMs)}`);
  return told;
}

/** Quiet notes about how the platform carried the answer. */
export function journey({ takeover, movedGateway }) {
  const told = [];
  if (takeover) told.push(takeover === "restarted" ? "started again on another replica" : "continued on another replica");
  if (movedGateway) told.push("resumed on another gateway");
  return told;
}
