// Client of stream-gw for browsers, and for Node with a WebSocket passed in. The wire is described in docs/protocol.md.
//
//   const gateway = new StreamGateway({ url: "https://gw.example", getToken });
//   const stream = gateway.create({ model, messages });
//   for await (const text of stream.text()) show(text);
//
// One socket carries every stream. A Stream applies only the frame after its cursor, so its reader sees each frame
// once and in order, also after reconnects.

export const BEGINNING = "1-0";
export const SUBPROTOCOL = "tokenstream.v1";

/** Limits, each with what happens at it. The options change all but `streams` and `requests`. */
export const LIMITS = Object.freeze({
  streams: 128, // streams open at once; over: create and subscribe throw too_many
  requests: 256, // cancels and inputs without an answer; over: they reject with too_many
  queueItems: 512, // items a slow reader leaves waiting; at it: unsubscribe until drained
  queueChars: 1 << 20, // the same in characters of JSON
  boundaries: 1024, // positions remembered to tell a reader how far a reset takes it back
  triesWithoutProgress: 8, // subscriptions in a row that brought nothing new; over: the stream fails
  requestTries: 8, // times a request refused as retriable is sent
  refreshes: 2, // new tokens in a row that the gateway refused; over: everything fails
  policyCloses: 3, // 1008 or 1009 in a row; over: everything fails
});

const TIMES_MS = Object.freeze({
  backoffMin: 250,
  backoffMax: 8_000,
  connect: 10_000, // until `hi`
  ping: 15_000, // until `hi` tells better
  lag: 3_000, // a head above our cursor is believed to be on its way for so long
  steady: 5_000, // a socket that lived so long proves that the backoff may start again
  giveUp: 900_000, // what the gateway keeps of an ended stream; later there is nothing to resume
});

const TERMINAL = new Set(["completed", "cancelled", "failed", "incomplete"]);
const CURSOR = /^(0|[1-9]\d{0,14})-(0|[1-9]\d{0,14})$/;

export class GatewayError extends Error {
  constructor(code, message, { retriable = false, retryAfterS = null, requestId = null, closeCode = null } = {}) {
    super(message);
    this.name = "GatewayError";
    Object.assign(this, { code, retriable, retryAfterS, requestId, closeCode });
  }

  static fromWire(error) {
    return new GatewayError(error.code ?? "internal_error", error.message ?? "The gateway reported an error.", {
      retriable: error.retriable === true,
      retryAfterS: error.retry_after_s ?? null,
      requestId: error.request_id ?? null,
    });
  }
}

const closedError = () => new GatewayError("client_closed", "The client was closed.");

function deferred() {
  const parts = {};
  parts.promise = new Promise((resolve, reject) => Object.assign(parts, { resolve, reject }));
  parts.promise.catch(() => {}); // whoever wants the outcome awaits the promise itself; nobody has to
  return parts;
}

/** A unique random id. crypto.randomUUID exists only on HTTPS and on loopback. */
export function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function parseCursor(text) {
  const match = CURSOR.exec(text);
  if (!match) throw new GatewayError("cursor_invalid", `${JSON.stringify(text)} is not a cursor such as ${BEGINNING}.`);
  return { n: Number(match[1]), s: Number(match[2]) };
}

const epochNumber = (epoch) => Number.parseInt(epoch, 10);

/** Pause with full jitter, so that clients cut at one instant come back spread over the interval. */
export function backoffMs(attempt, random = Math.random) {
  return random() * Math.min(TIMES_MS.backoffMax, TIMES_MS.backoffMin * 2 ** attempt);
}

/** The WebSocket address of a gateway given by its http(s) or ws(s) address. */
export function socketUrl(url) {
  const parsed = new URL(url, globalThis.location?.href);
  parsed.protocol = parsed.protocol.replace(/^http/, "ws");
  parsed.hash = parsed.search = "";
  if (!parsed.pathname.endsWith("/v1/stream")) parsed.pathname = `${parsed.pathname.replace(/\/$/, "")}/v1/stream`;
  return parsed.href;
}

const httpUrl = (socket, path) => socket.replace(/^ws/, "http").replace(/\/v1\/stream$/, path);

/** One stream: its frames in order, each once. Iterate it once: `for await (const item of stream)`. */
export class Stream {
  constructor(gateway, { id = null, after = BEGINNING, body, key, dialect, mode, signal, abort = "cancel" }) {
    if (abort !== "cancel" && abort !== "detach") throw new TypeError(`abort must be "cancel" or "detach"`);
    this.id = id;
    this.key = key ?? null;
    this.dialect = dialect;
    this.cursor = after; // of the last item handed to the reader
    this.status = "new";
    this.usage = null;
    this.error = null;
    this._gateway = gateway;
    this._body = body;
    this._mode = mode;
    this._tail = parseCursor(after); // of the last frame accepted, ahead of `cursor` by the queue
    this._epoch = this._tail.n;
    this._boundaries = [this._tail.s];
    this._queue = [];
    this._queueChars = 0;
    this._waiter = null;
    this._ended = false;
    this._paused = false;
    this._asked = false; // a create of ours may be known to a gateway
    this._tries = 0;
    this._timer = null;
    this._lagTimer = null;
    this._link = null;
    this._ch = 0;
    this._muted = false; // aborted: the reader is gone, the stream is still being cancelled
    this._stop = null; // a cancel that waits for the stream's id
    this._done = deferred();
    this._ready = deferred();
    this.done = this._done.promise;
    this.ready = this._ready.promise;
    this._listen(signal, abort);
  }

  [Symbol.asyncIterator]() {
    return this;
  }

  async next() {
    while (this._queue.length === 0) {
      if (this._ended || this._muted) return this._over();
      if (this._waiter) throw new TypeError("A Stream has one reader; subscribe again for another.");
      this._waiter = deferred();
      await this._waiter.promise;
    }
    const { item, chars } = this._queue.shift();
    this._queueChars -= chars;
    this.cursor = item.cursor;
    if (item.type === "data") {
      this._boundaries.push(item.seq);
      if (this._boundaries.length > LIMITS.boundaries) this._boundaries.splice(1, 1); // the start stays
    }
    if (this._paused && this._drained()) {
      this._paused = false;
      this._attachSoon(0);
    }
    return { done: false, value: item };
  }

  /** Leaving a `for await` early closes this reader. It does not stop the generation: cancel() does. */
  async return(value) {
    this.close();
    return { done: true, value };
  }

  /** The answer's text as it grows, of the dialects openai.chat and openai.completions. */
  async *text() {
    for await (const item of this) {
      if (item.type !== "data") {
        throw new GatewayError(`stream_${item.type}`, `Text already read is no longer the stream's: a ${item.type}.`);
      }
      const text = textOf(item.chunks);
      if (text) yield text;
    }
  }

  /** Stops the generation. Resolves with the gateway's ack; works while disconnected and before the first token. */
  cancel() {
    if (this._ended && TERMINAL.has(this.status)) {
      return Promise.resolve({ result: "terminal", at: this._tailCursor(), status: this.status });
    }
    if (this.id) return this._gateway.cancel(this.id);
    if (this._ended) return Promise.reject(this.error ?? closedError());
    if (!this._asked) {
      this._finish("cancelled");
      return Promise.resolve({ result: "accepted", at: BEGINNING, status: "cancelled" });
    }
    this._stop ??= deferred();
    this._gateway._wake();
    return this._stop.promise;
  }

  /** Stops reading. The generation goes on for as long as its `on_disconnect` says. */
  close() {
    if (this._ended) return;
    this._queue.length = 0;
    if (!this._stop) {
      this._finish("detached");
      return;
    }
    // A cancel still waits for the stream's id; only reading ends now.
    const leave = () => this._finish("detached");
    this._stop.promise.then(leave, leave);
    this._muted = true;
    this._wakeReader();
  }

  _listen(signal, abort) {
    if (!signal) return;
    const onAbort = () => {
      if (this._ended) return;
      const reason = signal.reason ?? new DOMException("The stream was aborted.", "AbortError");
      if (abort === "detach") {
        this._queue.length = 0;
        this._finish("detached", { error: reason });
        return;
      }
      // Reading ends at once; `done` waits for the gateway's answer, or for the error that prevented it.
      const acked = this.cancel();
      this._queue.length = 0;
      this._error(reason);
      acked.then(
        (ack) => this._finish(ack.status ?? "cancelled"),
        (error) => this._finish("failed", { error }),
      );
    };
    if (signal.aborted) queueMicrotask(onAbort);
    else signal.addEventListener("abort", onAbort, { once: true });
    this._unlisten = () => signal.removeEventListener("abort", onAbort);
  }

  /** Ends reading with an error while the cancel of the stream is still under way. */
  _error(error) {
    this.error = error;
    this._muted = true;
    this._wakeReader();
  }

  _over() {
    if (this.error) throw this.error;
    this.cursor = this._tailCursor();
    return { done: true, value: undefined };
  }

  _tailCursor() {
    return `${this._tail.n}-${this._tail.s}`;
  }

  _drained() {
    return this._queue.length <= this._gateway._queueItems / 4 && this._queueChars <= this._gateway._queueChars / 4;
  }

  _push(item, chars) {
    if (this._muted) return;
    this._queue.push({ item, chars });
    this._queueChars += chars;
    this._wakeReader();
    if (this._queue.length >= this._gateway._queueItems || this._queueChars >= this._gateway._queueChars) {
      this._paused = true; // the log is the queue: come back with the cursor once the reader has caught up
      this._detach(true);
    }
  }

  _wakeReader() {
    const waiter = this._waiter;
    this._waiter = null;
    if (this._muted && this.error) waiter?.reject(this.error);
    else waiter?.resolve();
  }

  // The wire

  _attach(link) {
    this._detach(true);
    if (this._ended || this._paused || this._timer) return;
    this._link = link;
    this._ch = link.claim(this);
    if (this.id) {
      // A snapshot is one chunk of all that came before; after a first part, `coalesce` joins the rest.
      const mode = this._mode === "snapshot" && this._tail.s > 0 ? "coalesce" : this._mode;
      link.send({ t: "sub", ch: this._ch, stream: this.id, after: this._tailCursor(), dialect: this.dialect, mode });
    } else {
      this._asked = true;
      link.send({ t: "create", ch: this._ch, dialect: this.dialect, body: this._body, key: this.key, mode: this._mode });
    }
  }

  _detach(tell) {
    clearTimeout(this._lagTimer);
    this._lagTimer = null;
    const link = this._link;
    this._link = null;
    link?.release(this._ch, tell);
  }

  _attachSoon(delayMs) {
    this._detach(true);
    clearTimeout(this._timer);
    const attach = () => {
      this._timer = null;
      if (this._gateway._link && !this._ended) this._attach(this._gateway._link);
    };
    if (delayMs > 0) this._timer = setTimeout(attach, delayMs);
    else attach();
  }

  /** Subscribes again from the cursor. Attempts without a new frame back off, and their number is limited. */
  _retry(error, delayMs = 0) {
    this._tries += 1;
    if (this._tries > LIMITS.triesWithoutProgress) return this._finish("failed", { error });
    const jittered = this._tries === 1 && delayMs === 0 ? 0 : backoffMs(this._tries, this._gateway._random);
    return this._attachSoon(Math.max(delayMs, jittered));
  }

  _hole(message) {
    this._retry(new GatewayError("protocol_error", message, { retriable: true }));
  }

  _receive(message, chars) {
    switch (message.t) {
      case "ok":
        return this._receiveOk(message);
      case "d":
        return this._receiveData(message, chars);
      case "end":
        return this._receiveEnd(message);
      case "gap":
        return this._receiveGap(message);
      case "reset":
        return this._receiveReset(message);
      default:
        return undefined; // a newer gateway may say more than we know
    }
  }

  /** The channel is open. A stream that has ended sends `ok` too; its `end` follows. */
  _receiveOk({ stream, epoch, status }) {
    this.id = stream;
    this.status = status;
    this._epoch = epochNumber(epoch);
    this._ready.resolve(stream);
    if (this._stop) {
      const stop = this._stop;
      this._stop = null;
      this._gateway.cancel(stream).then(stop.resolve, stop.reject);
    }
  }

  _accept(seq) {
    this._tail = { n: this._epoch, s: seq };
    this._tries = 0;
  }

  _receiveData({ a, s, f }, chars) {
    if (s <= this._tail.s) return;
    if ((a ?? s - 1) !== this._tail.s) {
      this._hole(`Frames between ${this._tail.s} and ${s} are missing.`);
      return;
    }
    this._accept(s);
    this._push({ type: "data", cursor: this._tailCursor(), seq: s, chunks: f }, chars);
  }

  _receiveEnd({ s, status, usage, error }) {
    this._detach(false);
    if (s - 1 > this._tail.s) {
      this._hole(`The stream ended at ${s}; frames after ${this._tail.s} are missing.`);
      return;
    }
    if (s > this._tail.s) this._accept(s);
    this.usage = usage ?? null;
    const failed = status === "failed";
    const failure = failed ? GatewayError.fromWire(error ?? { code: "failed", message: "The stream failed." }) : null;
    this._finish(status, { error: failure });
  }

  _receiveGap({ from, to }) {
    if (to <= this._tail.s) return;
    if (from > this._tail.s + 1) {
      this._hole(`Frames between ${this._tail.s} and ${from} are missing.`);
      return;
    }
    this._accept(to);
    this._push({ type: "gap", cursor: this._tailCursor(), seq: to, from, to }, 0);
  }

  _receiveReset({ epoch, to }) {
    this._epoch = epochNumber(epoch);
    if (to >= this._tail.s) return;
    while (this._queue.length > 0 && this._queue.at(-1).item.seq > to) {
      this._queueChars -= this._queue.pop().chars;
    }
    // The reader must be told of void items it has read; an item that joined several frames is void as a whole.
    const kept = this._queue.at(-1)?.item.seq ?? this._boundaries.findLast((seq) => seq <= to) ?? this._boundaries[0];
    const told = this._boundaries.at(-1) > to;
    if (told) this._boundaries = this._boundaries.filter((seq, index) => index === 0 || seq <= kept);
    this._tail = { n: this._epoch, s: kept };
    if (told) this._push({ type: "reset", cursor: this._tailCursor(), seq: kept, to: kept }, 0);
    if (kept !== to) this._attachSoon(0);
  }

  _receiveError(message) {
    this._detach(false);
    const error = GatewayError.fromWire(message);
    if (!this.id) this._asked = false; // refused: nothing runs
    if (!error.retriable) this._finish("failed", { error });
    else this._retry(error, Math.max(1, (error.retryAfterS ?? 0) * 1000));
  }

  /** A ping named a head above ours. Frames may be on their way, so only a lasting lag counts. */
  _lag(head) {
    if (head <= this._tail.s || this._lagTimer) return;
    const before = this._tail.s;
    this._lagTimer = setTimeout(() => {
      this._lagTimer = null;
      if (this._tail.s === before) this._hole(`The head is ${head} and nothing came after ${before}.`);
    }, this._gateway._lagMs);
  }

  _finish(status, { error = null } = {}) {
    if (this._ended) return;
    this._ended = true;
    this.status = status;
    this.error ??= error;
    this._detach(true);
    clearTimeout(this._timer);
    this._unlisten?.();
    this._gateway._forget(this);
    this._stop?.[TERMINAL.has(status) && !error ? "resolve" : "reject"](
      error ?? (TERMINAL.has(status) ? { result: "terminal", at: this._tailCursor(), status } : closedError()),
    );
    if (this.id) this._ready.resolve(this.id);
    else this._ready.reject(this.error ?? closedError());
    this._done.resolve({ status, usage: this.usage, cursor: this._tailCursor(), error: this.error });
    this._wakeReader();
  }
}

/** The text that chunks of openai.chat or openai.completions add to the first choice. */
export function textOf(chunks) {
  let text = "";
  for (const chunk of chunks) {
    const choice = chunk.choices?.find((each) => each.index === 0);
    text += choice?.delta?.content ?? choice?.text ?? "";
  }
  return text;
}

/** One WebSocket connection, from its opening to its end. Calls its owner once at the end. */
class Link {
  constructor(owner, url, token) {
    this.owner = owner;
    this.url = url;
    this.readyAt = null;
    this.channels = new Map();
    this.limitMs = TIMES_MS.connect;
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

  /** A dead connection may look open: only messages prove that it is alive. */
  watch() {
    const leftMs = this.heardAt + this.limitMs - Date.now();
    if (leftMs <= 0) this.over(1006, "silent");
    else this.timer = setTimeout(() => this.watch(), leftMs);
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
      else stream?._receive(message, text.length);
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
    this._streams = new Set();
    this._requests = new Map();
    this._channel = 0;
    this._requestId = 0;
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

  /** Starts a generation. `key` is its idempotency key: the same key and body never generate twice. */
  create(body, { dialect = "openai.chat", key, mode = "tokens", signal, abort } = {}) {
    return this._open({ body, key: key ?? randomId(), dialect, mode, signal, abort });
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

  /** Adds an input to a running stream. Retries do not add it twice. */
  input(streamId, item) {
    return this._request({ t: "input", stream: streamId, item }).promise;
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
    // The id stays the same over reconnects, so that an input is added once. Other clients' ids must differ.
    const id = message.t === "input" ? randomId() : `k${++this._requestId}`;
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
    if (!error.retriable || request.tries >= LIMITS.requestTries) {
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
    this._next = { over: () => {}, retire: () => {} }; // holds the place while the token is fetched
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
      else this._later(error);
      return;
    }
    if (opening !== this._opening || this._isClosed) return;
    try {
      this._next = new Link(this, this._urls[this._urlIndex], token);
    } catch (error) {
      this._next = null; // the address cannot be used at all, or the page's policy forbids it: no retry will help
      this._fail(new GatewayError("address_refused", error.message));
    }
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
    link.hintTimer = setTimeout(() => {
      if (this._next || this._timer) return;
      this._rotate();
      this._connect();
    }, Math.min(afterMs, 60_000));
  }

  _rotate() {
    this._urlIndex = (this._urlIndex + 1) % this._urls.length;
  }

  _linkOver(link, code, reason) {
    if (link !== this._link && link !== this._next) return;
    if (link === this._link) this._link = null;
    else this._next = null;
    this._attempt = link.readyAt && Date.now() - link.readyAt > TIMES_MS.steady ? 0 : this._attempt;
    const error = new GatewayError("connection_lost", `The connection was closed (${code}${reason ? `, ${reason}` : ""}).`, {
      retriable: true,
      closeCode: code,
    });
    const fatal = this._judge(link, code, error);
    if (fatal) this._fail(fatal);
    else if (!this._next) this._later(error);
    else if (!this._link) {
      this._downSince ??= Date.now();
      this._setState("reconnecting");
    }
  }

  /** Counts a close by its code. Returns an error when reconnecting cannot help. */
  _judge(link, code, error) {
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
      if (this._policyCloses >= LIMITS.policyCloses) return error;
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
      this._fail(error);
      return;
    }
    const offline = globalThis.navigator?.onLine === false;
    // The event `online` ends the pause. Some machines report offline wrongly, so attempts go on at long intervals.
    const delayMs = offline ? TIMES_MS.backoffMax : backoffMs(this._attempt, this._random);
    this._attempt = Math.min(this._attempt + 1, 16);
    if (!this._link) this._setState(offline ? "offline" : "reconnecting", { delayMs });
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
