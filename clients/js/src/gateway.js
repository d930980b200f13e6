// The client: its connection, its streams, and its requests.

import { deferred, unawaited } from "./deferred.js";
import { GatewayError, closedError } from "./errors.js";
import { LIMITS, TIMES_MS } from "./limits.js";
import { Link } from "./link.js";
import { backoffMs, isWaitedOut, randomId } from "./random.js";
import { Stream } from "./stream.js";
import { BEGINNING, copied, httpUrl, socketUrl } from "./wire.js";

/** What getToken throws may be anything, such as the TypeError of a fetch without a network. */
const tokenError = (thrown) =>
  new GatewayError("token_unavailable", `getToken failed: ${thrown?.message ?? thrown}`, { retriable: true });

export class StreamGateway {
  constructor(options = {}) {
    const { url, urls, token, getToken, webSocket, fetch, onState, random, giveUpMs, lagMs } = options;
    const given = urls ?? [url ?? globalThis.location?.origin];
    if (given.length === 0 || given.some((each) => !each)) throw new TypeError("url or urls is needed");
    this._urls = given.map(socketUrl);
    this._urlIndex = 0;
    this._token = token ?? null;
    this._getToken = getToken ?? null;
    this._WebSocket = webSocket ?? globalThis.WebSocket;
    if (!this._WebSocket) throw new TypeError("no WebSocket here: pass one as webSocket");
    this._fetch = fetch ?? globalThis.fetch?.bind(globalThis);
    this._onState = onState ?? (() => {});
    this._random = random ?? Math.random;
    this._giveUpMs = giveUpMs ?? TIMES_MS.giveUp;
    this._lagMs = lagMs ?? TIMES_MS.lag;
    this._queueItems = options.queueItems ?? LIMITS.queueItems;
    this._queueChars = options.queueChars ?? LIMITS.queueChars;

    this.state = "idle";
    this.messagesPassedOver = 0; // of types that this client does not know
    this._streams = new Set();
    this._requests = new Map();
    this._channel = 0;
    this._link = null; // delivers
    this._next = null; // being opened, perhaps while `_link` still delivers
    this._opening = 0; // the attempt that may still go on; an older one that wakes up stops
    this._timer = null;
    this._attempt = 0;
    this._downSince = null;
    this._refresh = false;
    this._refreshes = 0;
    this._policyCloses = 0;
    this._isClosed = false;
    this._onOnline = () => {
      this._attempt = 0; // what failed before says nothing about the network that is back
      this._wake();
    };
    this._onOffline = () => this._offline();
    globalThis.addEventListener?.("online", this._onOnline);
    globalThis.addEventListener?.("offline", this._onOffline);
  }

  /** Starts a generation. `key`: idempotency key. The same key and body generate again only after a retriable error. */
  create(body, { dialect = "openai.chat", key, mode = "tokens", signal, abort, onPlace } = {}) {
    return this._open({ body: copied(body), key: key ?? randomId(), dialect, mode, signal, abort, onPlace });
  }

  /** Reads a stream after a cursor (default: from its beginning). */
  subscribe(streamId, { after = BEGINNING, dialect = "openai.chat", mode = "tokens", signal, abort } = {}) {
    return this._open({ id: streamId, after, dialect, mode, signal, abort });
  }

  /** Stops a stream for all its readers. While disconnected, asks by HTTP at once and again over the next socket. */
  cancel(streamId) {
    for (const request of this._requests.values()) {
      if (request.message.t === "cancel" && request.message.stream === streamId) return request.promise;
    }
    const request = this._request({ t: "cancel", stream: streamId });
    if (!this._link && request.message) this._cancelByHttp(request);
    return request.promise;
  }

  /**
   * Steers a running stream: the answer is cut, and another one follows. Retries do not add the input twice. With an
   * `id`, neither does another call with it, for example after a reload.
   */
  input(streamId, item, { id = randomId() } = {}) {
    const waiting = this._requests.get(id);
    const message = { t: "input", stream: streamId, item: copied(item), id };
    if (!waiting) return this._request(message).promise;
    if (waiting.message.stream === streamId) return waiting.promise;
    // An id counts in its stream alone, but an answer names nothing else: the other stream's must come first.
    const send = () => this.input(streamId, message.item, { id });
    return unawaited(waiting.promise.then(send, send));
  }

  /** Opens the socket before it is needed. */
  connect() {
    this._assertOpen();
    if (!this._link && !this._next && !this._timer) this._connect();
  }

  /** Closes the client. Streams that have not ended end with client_closed. */
  close() {
    if (this._isClosed) return;
    this._isClosed = true;
    globalThis.removeEventListener?.("online", this._onOnline);
    globalThis.removeEventListener?.("offline", this._onOffline);
    this._fail(closedError());
  }

  _assertOpen() {
    if (this._isClosed) throw closedError();
  }

  _open(options) {
    this._assertOpen();
    if (this._streams.size >= LIMITS.streams) {
      throw new GatewayError("too_many", `${LIMITS.streams} streams are open; close one first.`);
    }
    const stream = new Stream(this, options);
    this._streams.add(stream);
    if (options.signal?.aborted) return stream;
    if (this._link) stream._attach(this._link);
    else this._wake();
    return stream;
  }

  _forget(stream) {
    this._streams.delete(stream);
  }

  _nextChannel() {
    this._channel = (this._channel % 0x7fffffff) + 1; // a new number each time: what is late for the old one misses
    return this._channel;
  }

  // Requests, answered by their id

  _request(message) {
    const request = { ...deferred(), message: null, tries: 0, sentOn: null, timer: null };
    if (this._isClosed) {
      request.reject(closedError());
      return request;
    }
    if (this._requests.size >= LIMITS.requests) {
      request.reject(new GatewayError("too_many", `${LIMITS.requests} requests wait for an answer.`));
      return request;
    }
    // An input's id stays the same over reconnects, so that it is added once. Other ids must differ from all inputs'.
    const id = message.id ?? randomId();
    request.message = { ...message, id };
    this._requests.set(id, request);
    this._send(request);
    if (!this._link) this._wake();
    return request;
  }

  _send(request) {
    if (!this._link || request.timer) return;
    request.sentOn = this._link;
    this._link.send(request.message);
  }

  _settle(id, ack) {
    const request = this._requests.get(id);
    if (!request) return;
    this._requests.delete(id);
    clearTimeout(request.timer);
    const { result, at, status } = ack;
    request.resolve({ result, at, status });
  }

  _refuse(request, error) {
    this._requests.delete(request.message.id);
    clearTimeout(request.timer);
    request.reject(error);
  }

  _requestFailed(message) {
    const error = GatewayError.fromWire(message);
    const request = this._requests.get(message.id);
    if (!request) {
      this._setState(this.state, { error }); // of the connection as a whole; its close code decides
      return;
    }
    request.tries += 1;
    if (!isWaitedOut(error) || request.tries >= LIMITS.requestTries) {
      this._refuse(request, error);
      return;
    }
    const delayMs = Math.max((error.retryAfterS ?? 0) * 1000, backoffMs(request.tries, this._random));
    request.timer = setTimeout(() => {
      request.timer = null;
      this._send(request);
    }, delayMs);
  }

  async _cancelByHttp(request) {
    if (!this._fetch) return;
    const { id, stream } = request.message;
    try {
      const token = await this._currentToken(false);
      const response = await this._fetch(httpUrl(this._urls[this._urlIndex], `/v1/streams/${stream}/cancel`), {
        method: "POST",
        headers: token ? { authorization: `Bearer ${token}` } : {},
        signal: AbortSignal.timeout(TIMES_MS.connect),
      });
      if (response.ok) this._settle(id, await response.json());
      else if (response.status === 403 || response.status === 404) {
        const { error } = await response.json();
        if (this._requests.has(id)) this._refuse(request, GatewayError.fromWire(error));
      }
    } catch {
      // HTTP fails too while the network is away. The request stays queued for the next socket.
    }
  }

  async _currentToken(refresh) {
    if (this._getToken) this._token = await this._getToken({ refresh });
    return this._token;
  }

  // The connection

  _setState(state, detail = {}) {
    if (state === this.state && !detail.error) return;
    this.state = state;
    this._onState(state, detail);
  }

  /** Ends the pause before the next connection attempt. */
  _wake() {
    if (this._isClosed || this._link || this._next) return;
    clearTimeout(this._timer);
    this._timer = null;
    this._connect();
  }

  _offline() {
    this._link?.over(1006, "offline");
    this._next?.over(1006, "offline");
    this._setState("offline");
  }

  async _connect() {
    const opening = ++this._opening;
    const timer = setTimeout(() => this._tokenLate(opening), TIMES_MS.token);
    this._next = { over: () => {}, retire: () => clearTimeout(timer) }; // holds the place while the token is fetched
    if (!this._link) {
      this._downSince ??= Date.now();
      if (this.state === "idle" || this.state === "closed") this._setState("connecting");
    }
    let token;
    try {
      token = await this._currentToken(this._refresh);
      this._refresh = false;
    } catch (error) {
      if (opening !== this._opening || this._isClosed) return;
      this._next = null;
      if (error instanceof GatewayError && !error.retriable) this._fail(error);
      else this._later(error instanceof GatewayError ? error : tokenError(error));
      return;
    } finally {
      clearTimeout(timer);
    }
    if (opening !== this._opening || this._isClosed) return;
    try {
      this._next = new Link(this, this._urls[this._urlIndex], token);
    } catch (error) {
      this._next = null; // the address cannot be used at all, or the page's policy forbids it: no retry will help
      this._fail(new GatewayError("address_refused", error.message));
    }
  }

  _tokenLate(opening) {
    if (opening !== this._opening) return;
    this._opening += 1; // what that getToken returns comes too late
    this._next = null;
    this._later(tokenError(`no token after ${TIMES_MS.token / 1000} s`));
  }

  _linkReady(link) {
    const old = this._link;
    this._link = link;
    this._next = null;
    this._downSince = null;
    this._refreshes = 0;
    for (const stream of this._streams) stream._attach(link); // tells the old link to stop, then asks the new one
    for (const request of this._requests.values()) this._send(request);
    old?.retire();
    this._setState("connected");
  }

  /** The gateway drains: connects to another. The old socket delivers until the new one is ready. */
  _hint(link, afterMs) {
    if (link !== this._link || link.hintTimer) return;
    let delayMs = afterMs;
    if (Date.now() - link.readyAt < TIMES_MS.steady) {
      // Asked as soon as it is connected: every gateway may drain, so connections are spread.
      delayMs = Math.max(afterMs, backoffMs(this._attempt, this._random));
      this._attempt = Math.min(this._attempt + 1, 16);
    }
    link.hintTimer = setTimeout(() => this._leave(link), Math.min(delayMs, 60_000));
  }

  /** Connects to another gateway now; the streams move when it is ready. */
  _leave(link) {
    if (link !== this._link || this._next || this._timer) return;
    this._rotate();
    this._connect();
  }

  _rotate() {
    this._urlIndex = (this._urlIndex + 1) % this._urls.length;
  }

  _linkOver(link, code, reason) {
    if (link !== this._link && link !== this._next) return;
    if (link === this._link) this._link = null;
    else this._next = null;
    if (link.readyAt && Date.now() - link.readyAt > TIMES_MS.steady) this._attempt = this._policyCloses = 0;
    const error = new GatewayError("connection_lost", `The connection was closed (${code}${reason ? `, ${reason}` : ""}).`, {
      retriable: true,
      closeCode: code,
    });
    const fatal = this._judge(link, code);
    if (fatal) this._fail(fatal);
    else if (!this._next) this._later(error);
    else if (!this._link) {
      this._downSince ??= Date.now();
      this._setState("reconnecting");
    }
  }

  /** Counts a close by its code. Returns an error when reconnecting cannot help. */
  _judge(link, code) {
    const told = (name, message) => new GatewayError(name, message, { closeCode: code });
    if (code === 4403) return told("forbidden", "The gateway refuses this token.");
    if (code === 4401) {
      this._refresh = true;
      this._refreshes += 1;
      if (!this._getToken || this._refreshes > LIMITS.refreshes) {
        return told("invalid_api_key", "The token is missing, unknown or expired.");
      }
    } else if (code === 1008 || code === 1009) {
      this._policyCloses += 1;
      if (this._policyCloses >= LIMITS.policyCloses) {
        return told("refused", `The gateway closed ${this._policyCloses} connections in a row over messages of ours (${code}).`);
      }
      this._blame(link, told("refused", `The gateway closed the connection over a message of ours (${code}).`));
    } else {
      this._policyCloses = 0;
      if (code === 1013 || code === 4429) this._attempt = Math.max(this._attempt, 3);
      if (code === 1012) this._attempt = Math.max(this._attempt, 2); // everybody else was cut in this instant too
      if (code !== 4408) this._rotate();
    }
    return null;
  }

  /** Fails what is unanswered: one of these messages made the gateway close the connection, and would again. */
  _blame(link, error) {
    for (const request of this._requests.values()) if (request.sentOn === link) this._refuse(request, error);
    for (const stream of this._streams) if (!stream.id && stream._asked) stream._finish("failed", { error });
  }

  _later(error) {
    if (!this._link) this._downSince ??= Date.now();
    if (!this._link && Date.now() - this._downSince > this._giveUpMs) {
      const given = error.code === "connection_lost"; // else it is from getToken
      this._fail(given ? error : new GatewayError("connection_lost", `No connection: ${error.message}`, { retriable: true }));
      return;
    }
    const offline = globalThis.navigator?.onLine === false;
    // The event `online` ends the pause. Some machines report offline wrongly, so attempts go on at long intervals.
    const delayMs = offline ? TIMES_MS.backoffMax : backoffMs(this._attempt, this._random);
    this._attempt = Math.min(this._attempt + 1, 16);
    if (!this._link) this._setState(offline ? "offline" : "reconnecting", { delayMs, error });
    clearTimeout(this._timer);
    this._timer = setTimeout(() => {
      this._timer = null;
      this._connect();
    }, delayMs);
  }

  /** Ends every stream and request with the error. A later call connects again. */
  _fail(error) {
    this._opening += 1;
    clearTimeout(this._timer);
    this._timer = null;
    this._next?.retire();
    const link = this._link;
    this._link = this._next = null;
    this._downSince = null;
    this._attempt = this._refreshes = this._policyCloses = 0;
    for (const stream of [...this._streams]) stream._finish("failed", { error });
    link?.retire();
    for (const request of [...this._requests.values()]) this._refuse(request, error);
    this._setState("closed", { error });
  }
}
