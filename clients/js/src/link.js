// One WebSocket connection.

import { TIMES_MS } from "./limits.js";
import { SUBPROTOCOL } from "./wire.js";

/** One WebSocket connection, from its opening to its end. Calls its owner once at the end. */
export class Link {
  constructor(owner, url, token) {
    this.owner = owner;
    this.url = url;
    this.readyAt = null;
    this.gatewayId = null;
    this.channels = new Map();
    this.limitMs = token ? TIMES_MS.connect : TIMES_MS.connectNoToken; // a page may have a cookie instead
    this.heardAt = Date.now();
    this.isOver = false;
    this.hintTimer = null;
    this.socket = new owner._WebSocket(url, [SUBPROTOCOL]);
    this.socket.onopen = () => token && this.send({ t: "auth", token });
    this.socket.onmessage = (event) => this.receive(event.data);
    this.socket.onclose = (event) => this.over(event.code ?? 1006, event.reason);
    this.socket.onerror = () => {}; // a close always follows, and it has the code
    this.watch();
  }

  /**
   * A dead connection may look open: only messages prove that it is alive. Timers stand still while the machine sleeps,
   * so the clock is read often.
   */
  watch() {
    this.heardAt = Math.min(this.heardAt, Date.now()); // the clock may have gone back
    const leftMs = this.heardAt + this.limitMs - Date.now();
    if (leftMs <= 0) this.over(1006, "silent");
    else this.timer = setTimeout(() => this.watch(), Math.min(leftMs, TIMES_MS.watch));
  }

  claim(stream) {
    const ch = this.owner._nextChannel();
    this.channels.set(ch, stream);
    return ch;
  }

  release(ch, tell) {
    if (this.channels.delete(ch) && tell) this.send({ t: "unsub", ch });
  }

  send(message) {
    if (this.socket.readyState === 1) this.socket.send(JSON.stringify(message));
  }

  receive(text) {
    if (this.isOver) return;
    this.heardAt = Date.now();
    let message;
    try {
      message = JSON.parse(text);
    } catch {
      this.over(1006, "not JSON"); // bytes were mangled on the way; a new socket starts clean from our cursors
      return;
    }
    if (message.t === "ping") {
      this.send({ t: "pong" });
      for (const [ch, head] of Object.entries(message.head ?? {})) this.channels.get(Number(ch))?._lag(head);
    } else if (message.t === "hi") {
      this.readyAt = Date.now();
      this.gatewayId = message.gateway ?? null;
      this.limitMs = 2.5 * (message.ping_ms ?? TIMES_MS.ping);
      clearTimeout(this.timer);
      this.watch();
      this.owner._linkReady(this);
    } else if (message.t === "reconnect") {
      this.owner._hint(this, message.after_ms ?? 0);
    } else if (message.t === "ack") {
      this.owner._settle(message.id, message);
    } else if (message.t === "error" && message.ch === undefined) {
      this.owner._requestFailed(message);
    } else {
      const stream = this.channels.get(message.ch);
      if (message.t === "error") stream?._receiveError(message);
      else if (stream) stream._receive(message, text.length);
      else if (message.ch === undefined) this.owner.messagesPassedOver += 1;
    }
  }

  over(code, reason) {
    if (this.isOver) return;
    this.retire();
    this.owner._linkOver(this, code, reason);
  }

  /** Closes without a call to the owner. */
  retire() {
    if (this.isOver) return;
    this.isOver = true;
    clearTimeout(this.timer);
    clearTimeout(this.hintTimer);
    this.socket.onopen = this.socket.onmessage = this.socket.onclose = null;
    for (const stream of this.channels.values()) {
      if (stream._link === this) stream._detach(false);
    }
    this.channels.clear();
    if (this.socket.readyState <= 1) this.socket.close(1000);
  }
}
