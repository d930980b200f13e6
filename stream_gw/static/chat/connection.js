// The connection indicator in the page's head, and why there is no connection.

import { $ } from "../dom.js";

const STATES = {
  idle: "Connecting",
  connecting: "Connecting",
  connected: "Connected",
  reconnecting: "Reconnecting",
  resuming: "Resuming",
  blocked: "WebSockets blocked",
  offline: "Offline",
  closed: "Disconnected",
};

export function showConnection(state) {
  const node = $("connection");
  if (node.dataset.state === state) return;
  node.dataset.state = state;
  node.lastElementChild.textContent = STATES[state];
}

const ATTEMPTS = 3; // that fail before the page asks why

/** Finds out that requests reach the gateway and WebSockets never did: a proxy on the way does not pass them. */
export class Reach {
  constructor(onBlocked) {
    this.onBlocked = onBlocked;
    this.failed = 0;
    this.isBlocked = false;
  }

  /** Takes the client's state, and returns the one to show. */
  shown(state, error) {
    if (state === "connected") {
      this.failed = NaN; // what has worked once is interrupted, not blocked
      this.isBlocked = false;
    } else if (state === "reconnecting" && error?.closeCode === 1006) {
      this.failed += 1;
      if (this.failed % ATTEMPTS === 0 && !this.isBlocked) this.ask();
    }
    return this.isBlocked && state === "reconnecting" ? "blocked" : state;
  }

  async ask() {
    const response = await fetch("/v1/stream", { cache: "no-store" }).catch(() => null);
    if (!this.failed || !response?.headers.has("x-request-id")) return; // no gateway has answered
    this.isBlocked = true;
    this.onBlocked();
  }
}
