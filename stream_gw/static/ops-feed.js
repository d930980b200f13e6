// The session and the feed of snapshots. An API key is exchanged for a token and then discarded; the token stays in
// this tab, and no script of another page can read it.

import { GatewayError } from "./client.js";
import { ANSWER_MS, errorOf } from "./session.js";
import { tab } from "./storage.js";

const TOKEN = "sgw.ops.token";
const SHIFT_S = 8 * 3600;
const SILENT_MS = 25_000; // heartbeats come every 10 s at most
const SILENT = `No event came for ${SILENT_MS / 1000} s: the gateway is away, or a proxy in front of it buffers responses.`;
const HIDDEN_MS = 60_000; // time after which a hidden tab closes its feed, for others to use
const SNAPSHOT_CHARS_MAX = 8 << 20;
const REFUSED = ["invalid_api_key", "forbidden", "not_signed_in"];

export class OpsSession {
  constructor() {
    this.key = null; // only where the fleet issues no tokens, and only in memory
    this.load();
  }

  load() {
    try {
      this.token = JSON.parse(tab.getItem(TOKEN));
    } catch {
      this.token = null;
    }
  }

  /** The key in the address of the page. It stays there until the gateway has answered: a reload needs it, too. */
  keyInAddress() {
    return new URLSearchParams(location.hash.slice(1)).get("key");
  }

  forgetAddress() {
    const fragment = new URLSearchParams(location.hash.slice(1));
    if (!fragment.has("key")) return;
    fragment.delete("key");
    const rest = fragment.toString();
    history.replaceState(null, "", location.pathname + location.search + (rest ? `#${rest}` : ""));
  }

  async signIn(key) {
    this.signOut();
    const response = await fetch("/v1/tokens", {
      method: "POST",
      headers: { authorization: `Bearer ${key}`, "content-type": "application/json" },
      body: JSON.stringify({ scopes: ["admin"], expires_in_s: SHIFT_S }),
      signal: AbortSignal.timeout(ANSWER_MS),
    }).catch(() => {
      throw new GatewayError("unreachable", "The gateway cannot be reached.", { retriable: true });
    });
    if (response.status === 403) {
      // The key may still open the feed where the fleet issues no tokens; the feed answers that
      this.key = key;
      return;
    }
    if (!response.ok) throw await errorOf(response);
    const { token } = await response.json();
    this.token = { token, expiresAt: Date.now() / 1000 + SHIFT_S }; // by the clock that it is compared with
    tab.setItem(TOKEN, JSON.stringify(this.token));
  }

  signOut() {
    tab.removeItem(TOKEN);
    this.key = this.token = null;
  }

  get isSignedIn() {
    return Boolean(this.key ?? (this.token && this.token.expiresAt * 1000 > Date.now()));
  }

  headers() {
    if (!this.isSignedIn) throw new GatewayError("not_signed_in", this.token ? "Your token has expired: sign in again." : "");
    return { authorization: `Bearer ${this.key ?? this.token.token}` };
  }

  /** The JSON response of a path below /v1/admin. Throws the gateway's error. */
  async get(path, signal) {
    const response = await fetch(`/v1/admin${path}`, { headers: this.headers(), signal, cache: "no-store" });
    if (!response.ok) throw await errorOf(response);
    return response.json();
  }
}

/** Receives snapshots, from any gateway, while the page is visible. */
export class Feed {
  /** `onState(state, error)`: connecting, connected or reconnecting. `onRefused(error)`: the feed has ended. */
  constructor(session, { onSnapshot, onState, onRefused }) {
    Object.assign(this, { session, onSnapshot, onState, onRefused });
    this.isStopped = false;
    this.isAsleep = false;
    this.tries = 0;
    this.wake = () => {};
    this.onOnline = () => this.wake();
    this.onVisibility = () => this.seen();
    addEventListener("online", this.onOnline);
    document.addEventListener("visibilitychange", this.onVisibility);
  }

  seen() {
    clearTimeout(this.hiding);
    if (document.visibilityState === "visible") {
      this.isAsleep = false;
      this.wake();
    } else {
      this.hiding = setTimeout(() => {
        this.isAsleep = true;
        this.controller?.abort();
      }, HIDDEN_MS);
    }
  }

  stop() {
    this.isStopped = true;
    clearTimeout(this.hiding);
    removeEventListener("online", this.onOnline);
    document.removeEventListener("visibilitychange", this.onVisibility);
    this.controller?.abort();
    this.wake();
  }

  async run() {
    this.onState("connecting", null);
    while (!this.isStopped) {
      let error = null;
      try {
        await this.read();
      } catch (caught) {
        error = caught;
      }
      if (this.isStopped) return;
      if (REFUSED.includes(error?.code)) {
        this.stop();
        this.onRefused(error);
        return;
      }
      this.onState("reconnecting", error);
      await this.rest(error);
    }
  }

  rest(error) {
    // A draining gateway has others beside it, so reconnect at once; otherwise back off with jitter
    const most = error?.code === "draining" ? 1000 : error?.code === "too_many" ? 8000 : Math.min(500 * 2 ** this.tries, 8000);
    this.tries += 1;
    return new Promise((resolve) => {
      this.wake = () => {
        clearTimeout(timer);
        if (!this.isAsleep) resolve();
      };
      const timer = setTimeout(this.wake, most * (0.5 + Math.random() / 2));
    });
  }

  async read() {
    this.controller = new AbortController();
    const { signal } = this.controller;
    let silence;
    let isSilent = false;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => {
        isSilent = true;
        this.controller.abort();
      }, SILENT_MS);
    };
    heard();
    try {
      const response = await fetch("/v1/admin/ops", { headers: this.session.headers(), signal, cache: "no-store" });
      if (!response.ok) throw await errorOf(response);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        heard();
        text += value;
        const lines = text.split("\n");
        text = lines.pop();
        if (text.length > SNAPSHOT_CHARS_MAX) throw new GatewayError("too_large", "The snapshot is too large to display.");
        for (const line of lines) if (line.startsWith("data: ")) this.receive(JSON.parse(line.slice(6)));
      }
    } catch (error) {
      throw isSilent ? new GatewayError("silent", SILENT, { retriable: true }) : error;
    } finally {
      clearTimeout(silence);
      this.controller.abort();
    }
  }

  receive(message) {
    if (message.error) throw GatewayError.fromWire(message.error);
    this.tries = 0;
    this.onState("connected", null);
    this.onSnapshot(message);
  }
}
