// The connection indicator in the page's head.

import { $ } from "../dom.js";

const STATES = {
  idle: "Connecting",
  connecting: "Connecting",
  connected: "Connected",
  reconnecting: "Reconnecting",
  resuming: "Resuming",
  offline: "Offline",
  closed: "Disconnected",
};

export function showConnection(state) {
  const node = $("connection");
  if (node.dataset.state === state) return;
  node.dataset.state = state;
  node.lastElementChild.textContent = STATES[state];
}
