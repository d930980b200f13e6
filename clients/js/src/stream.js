// One response, from its create or a cursor to its end.

import { deferred, unawaited } from "./deferred.js";
import { GatewayError, closedError } from "./errors.js";
import { LIMITS } from "./limits.js";
import { ItemQueue } from "./queue.js";
import { backoffMs, isWaitedOut } from "./random.js";
import { BEGINNING, TERMINAL, copied, epochNumber, parseCursor, texts } from "./wire.js";

/** One stream: its frames in order, each once. Iterate it once: `for await (const item of stream)`. */
export class Stream {
  constructor(gateway, { id = null, after = BEGINNING, body, key, dialect, mode, signal, abort = "cancel", onPlace = null }) {
    if (abort !== "cancel" && abort !== "detach") throw new TypeError(`abort must be "cancel" or "detach"`);
    this.id = id;
    this.key = key ?? null;
    this.dialect = dialect;
    this.cursor = after; // of the last item handed to the reader
    this.status = "new";
    this.usage = null;
    this.structuredOutput = null;
    this.error = null;
    this.gatewayId = null; // of the gateway that delivers the stream, or did last; null: it is of an older release
    this.attachments = 0; // gateways' sockets that have delivered it, one after another
    this._onPlace = onPlace;
    this._place = null; // in the queue
    this._gateway = gateway;
    this._body = body;
    this._mode = mode;
    this._tail = parseCursor(after); // of the last frame accepted, ahead of `cursor` by the queue
    this._epoch = this._tail.n;
    this._queue = new ItemQueue(this._tail, gateway._queueItems, gateway._queueChars);
    this._inputSeq = 0; // the last input whose result was told
    this._waiter = null;
    this._ended = false;
    this._hasEnd = false; // the gateway told the end; else only our reading has ended, and the stream may still run
    this._paused = false;
    this._asked = false; // a create of ours may be known to a gateway
    this._refused = 0; // how often our create was refused
    this._tries = 0;
    this._timer = null;
    this._lagTimer = null;
    this._link = this._notedLink = null;
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

  /** Number of the producer's epoch; above 1, another replica has taken the stream over. */
  get epoch() {
    return this._epoch;
  }

  async next() {
    while (this._queue.length === 0) {
      if (this._ended || this._muted) return this._over();
      if (this._waiter) throw new TypeError("A Stream has one reader; subscribe again for another.");
      this._waiter = deferred();
      await this._waiter.promise;
    }
    const item = this._queue.shift();
    this.cursor = item.cursor;
    if (this._paused && this._queue.isDrained) {
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
  text() {
    return texts(this);
  }

  /** Stops the generation. Resolves with the gateway's ack; works while disconnected and before the first token. */
  cancel() {
    if (this._ended && TERMINAL.has(this.status) && (this._hasEnd || (!this.id && !this._asked))) {
      return Promise.resolve({ result: "terminal", at: this._tailCursor(), status: this.status });
    }
    if (this.id) return this._gateway.cancel(this.id);
    if (this._ended) return unawaited(Promise.reject(this.error ?? closedError()));
    if (!this._asked) {
      this._finish("cancelled");
      return Promise.resolve({ result: "accepted", at: BEGINNING, status: "cancelled" });
    }
    this._stop ??= deferred();
    this._gateway._wake();
    return this._stop.promise;
  }

  /** Steers the stream with a user's message; an `input` item says where it was applied. */
  input(item, options) {
    const said = copied(item);
    return unawaited(this.ready.then((id) => this._gateway.input(id, said, options)));
  }

  /** Stops reading. The generation goes on for as long as its `on_disconnect` says. */
  close() {
    if (this._ended) return;
    this._queue.clear();
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
        this._queue.clear();
        this._finish("detached", { error: reason });
        return;
      }
      // Reading ends at once; `done` waits for the gateway's answer, or for the error that prevented it.
      const acked = this.cancel();
      this._queue.clear();
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

  _push(item, chars) {
    if (this._muted) return;
    this._queue.push(item, chars, this._tail);
    this._wakeReader();
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
      const create = { t: "create", ch: this._ch, dialect: this.dialect, body: this._body, key: this.key, mode: this._mode };
      link.send({ ...create, ...(this._refused && { retry: this._refused }), ...(this._onPlace && { queued: true }) });
    }
  }

  _detach(tell) {
    clearTimeout(this._lagTimer);
    this._lagTimer = null;
    this._setPlace(null); // who reads on after a cut is not told
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
    if (this._queue.isFull && (message.t === "d" || message.t === "gap")) {
      this._paused = true; // the log is the queue: come back with the cursor once the reader has caught up
      this._detach(true); // not before: the result of an input follows its frame, and is not repeated
      return undefined;
    }
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
      case "steered":
        return this._receiveInput(message);
      case "queued":
        return this._setPlace({ position: message.position, of: message.of, warmingS: message.warming_s ?? null });
      default:
        this._gateway.messagesPassedOver += 1; // a newer gateway may say more than we know
        return undefined;
    }
  }

  /** The channel is open. A stream that has ended sends `ok` too; its `end` follows. */
  _receiveOk({ stream, epoch, status }) {
    this.id = stream;
    this.status = status;
    this._epoch = epochNumber(epoch);
    this._noteLink();
    this._ready.resolve(stream);
    if (this._stop) {
      const stop = this._stop;
      this._stop = null;
      this._gateway.cancel(stream).then(stop.resolve, stop.reject);
    }
  }

  _noteLink() {
    if (this._link === this._notedLink) return;
    this._notedLink = this._link;
    this.gatewayId = this._link.gatewayId;
    this.attachments += 1;
  }

  _setPlace(place) {
    if (!this._onPlace || (!place && !this._place)) return;
    this._place = place;
    this._onPlace(place);
  }

  _accept(seq) {
    this._setPlace(null);
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

  _receiveEnd({ s, status, usage, error, structured_output: checks }) {
    this._detach(false);
    if (s - 1 > this._tail.s) {
      this._hole(`The stream ended at ${s}; frames after ${this._tail.s} are missing.`);
      return;
    }
    if (s > this._tail.s) this._accept(s);
    this._hasEnd = true;
    this.usage = usage ?? null;
    this.structuredOutput = checks ?? null;
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

  _receiveInput({ s, id, result, reason }) {
    if (s <= this._inputSeq || s > this._tail.s) return;
    this._inputSeq = s;
    this._push({ type: "input", cursor: this._tailCursor(), seq: s, id, result, reason }, 0);
  }

  _receiveReset({ epoch, to }) {
    this._epoch = epochNumber(epoch);
    if (to >= this._tail.s) return;
    const { tail, wasRead } = this._queue.rewind({ n: this._epoch, s: to });
    this._tail = tail;
    this._inputSeq = Math.min(this._inputSeq, tail.s);
    if (wasRead) this._push({ type: "reset", cursor: this._tailCursor(), seq: tail.s, to: tail.s }, 0);
    if (tail.s !== to) this._attachSoon(0);
  }

  _receiveError(message) {
    const link = this._link;
    this._detach(false);
    const error = GatewayError.fromWire(message);
    if (!this.id) {
      this._asked = false; // refused: nothing runs
      this._refused += 1;
    }
    if (error.code === "draining" && link && link === this._gateway._link && !this._tries) {
      this._tries = 1;
      this._gateway._leave(link); // it attaches this stream to the next link
    } else if (!isWaitedOut(error)) this._finish("failed", { error });
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
