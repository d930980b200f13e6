// The session: an API key, kept only in this tab's sessionStorage, and the capability token that it was exchanged for.
// Other tabs of this browser may borrow the token, never the key.

import { GatewayError, randomId } from "./client.js";
import { local, remember, tab } from "./storage.js";

const KEY = "sgw.key";
const USER = "sgw.user";
const EARLY_MS = 30_000; // time before its expiry at which a token is replaced
export const ANSWER_MS = 10_000; // time for the gateway to answer: a connection from before a sleep may be dead
const LEND_MS = 300; // time for another tab to lend its token

export async function errorOf(response) {
  const body = await response.json().catch(() => ({})); // a proxy's error page is not JSON; the status is enough
  return GatewayError.fromWire({
    code: `http_${response.status}`,
    message: `The gateway answered ${response.status}.`,
    retriable: response.status === 429 || response.status >= 500,
    ...body.error,
  });
}

export class Session {
  constructor() {
    this.token = null;
    this.expiresAt = 0;
    this.channel = new BroadcastChannel("sgw.session");
    this.channel.onmessage = ({ data }) => this.hear(data);
    this.borrowing = null;
    const fragment = new URLSearchParams(location.hash.slice(1));
    if (fragment.has("key")) {
      tab.setItem(KEY, fragment.get("key"));
      history.replaceState(null, "", location.pathname + location.search);
    }
  }

  get key() {
    return tab.getItem(KEY);
  }

  get user() {
    this.name ??= local.getItem(USER);
    if (!this.name) {
      this.name = `web-${randomId()}`;
      remember(USER, this.name);
    }
    return this.name;
  }

  async signIn(key) {
    tab.setItem(KEY, key);
    this.token = this.renewal = null; // what is asked for without the key is of no use
    return this.getToken();
  }

  signOut() {
    tab.removeItem(KEY);
    this.token = null;
  }

  /** A valid capability token. Throws not_signed_in when there is neither a key nor another tab to lend one. */
  async getToken({ refresh = false } = {}) {
    const isFresh = this.token && Date.now() < this.expiresAt - EARLY_MS;
    if (isFresh && !refresh) return this.token;
    if (this.renewal) return this.renewal; // all who ask at once wait for one token
    const over = () => {
      if (this.renewal === renewal) this.renewal = null;
    };
    const renewal = this.renew().finally(over);
    this.renewal = renewal;
    return renewal;
  }

  async renew() {
    this.token = null;
    if (this.key) await this.mint();
    else await this.borrow();
    if (!this.token) throw new GatewayError("not_signed_in", "Sign in with an API key.");
    return this.token;
  }

  async mint() {
    const asked = { scopes: ["create", "read", "cancel", "input"], user: this.user, expires_in_s: 3600 };
    const { token, expires_at: expiresAt } = await this.askToken(asked);
    this.token = token;
    this.expiresAt = expiresAt * 1000;
  }

  /** A token that reads one stream and does nothing else, until `expiresAt` in Unix seconds. */
  async mintLink(stream, expiresInS) {
    if (!this.key) {
      throw new GatewayError("not_signed_in", "Only the tab in which you signed in can share. Open the conversation there.");
    }
    const { token, expires_at: expiresAt } = await this.askToken({ scopes: ["read"], stream, expires_in_s: expiresInS });
    return { token, expiresAt };
  }

  /** Ends all links to a stream, also for those who watch at this moment. */
  async endLinks(stream) {
    await this.call("DELETE", `/v1/streams/${encodeURIComponent(stream)}/links`, await this.getToken());
  }

  async askToken(asked) {
    return (await this.call("POST", "/v1/tokens", this.key, asked)).json();
  }

  async call(method, path, credential, body) {
    const response = await fetch(path, {
      method,
      headers: { authorization: `Bearer ${credential}`, "content-type": "application/json" },
      body: body && JSON.stringify(body),
      signal: AbortSignal.timeout(ANSWER_MS),
    }).catch(() => {
      throw new GatewayError("unreachable", "The gateway cannot be reached.", { retriable: true });
    });
    if (!response.ok) throw await errorOf(response);
    return response;
  }

  borrow() {
    return new Promise((resolve) => {
      this.borrowing = resolve;
      this.channel.postMessage({ ask: true });
      setTimeout(resolve, LEND_MS);
    });
  }

  hear({ ask, token, expiresAt }) {
    if (ask && this.token) this.channel.postMessage({ token: this.token, expiresAt: this.expiresAt });
    if (token && this.borrowing && !this.token) {
      Object.assign(this, { token, expiresAt });
      this.borrowing();
    }
  }
}
