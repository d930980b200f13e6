// One running answer: reads its stream into a message and stores the message's text and cursor together, so that a
// reload, another tab or a new socket continues at the same position.

import { BEGINNING, GatewayError, randomId, textOf } from "../client.js";
import { indexOf, mark, merge, refuse, unmark, waiting } from "./inputs.js";

const SAVE_MS = 250;
const SPEED_MS_MIN = 100; // shorter answers have no meaningful speed
const RESTARTABLE = new Set(["cursor_gone", "cursor_invalid"]);
const RESTARTS_MAX = 3;
// Errors that end reading but not the stream: it stays stored as running, for another tab or the next sign-in.
const OURS = new Set(["client_closed", "not_signed_in", "invalid_api_key", "forbidden"]);

export class Answer {
  /** `makeBody()` returns the request's body, for a stream that is still to be created. `onChange(answer)` tells that
   * the message grew or ended. */
  constructor({ gateway, store, message, makeBody, onChange }) {
    Object.assign(this, { gateway, store, message, makeBody, onChange });
    this.stream = null;
    this.saveTimer = null;
    this.restarts = 0;
    this.isResuming = Boolean(message.stream);
    this.isOver = false;
    this.isStopping = false;
    this.place = null; // in the queue
    this.isAbandoned = false; // stopped before its request was made
    this.abandon = () => {};
    this.askedAt = message.stream || message.wasSent ? null : performance.now();
    this.firstAt = null;
    this.lastAt = null;
    this.ended = this.run();
  }

  async run() {
    const { message } = this;
    try {
      let outcome = await this.read(message.cursor, "tokens");
      // The position is gone, but the stream may still be readable from its beginning.
      while (outcome === "restart") outcome = await this.read(BEGINNING, "snapshot");
      message.status = outcome;
      this.measure();
    } catch (error) {
      if (!OURS.has(error.code)) message.status = "failed";
      message.error = { code: error.code ?? "error", message: error.message, retriable: error.retriable === true };
    }
    // An input without a result after the end was not applied
    if (message.status !== "running" && message.status !== "starting") for (const input of waiting(message)) refuse(input, "ended");
    this.isResuming = false;
    this.isOver = true;
    this.save();
    this.onChange(this);
  }

  async read(after, mode) {
    const { gateway, message } = this;
    let stream;
    if (message.stream) stream = gateway.subscribe(message.stream, { after, mode });
    else {
      const body = await Promise.race([this.makeBody(), new Promise((resolve) => (this.abandon = resolve))]);
      if (this.isAbandoned) return "cancelled";
      message.wasSent = true;
      stream = gateway.create(body, { key: message.key, mode, onPlace: (place) => this.waits(place) });
    }
    this.stream = stream;
    if (after === BEGINNING && message.text) this.forget();
    stream.ready.then(
      (id) => this.accepted(id),
      () => {}, // the loop below meets the same error
    );
    try {
      for await (const item of stream) {
        if (item.type === "gap") message.hasGap = true;
        else if (item.type === "reset") return this.restart();
        else if (item.type === "data") this.apply(item); // its chunks have the inputs too, each in its place
      }
    } catch (error) {
      if (!RESTARTABLE.has(error.code) || this.restarts > 0) throw error;
      return this.restart();
    }
    this.noteJourney();
    message.cursor = stream.cursor;
    message.usage = stream.usage;
    return stream.status;
  }

  waits(place) {
    this.place = place;
    this.onChange(this);
  }

  restart() {
    this.restarts += 1;
    this.stream.close();
    if (this.restarts <= RESTARTS_MAX) return "restart";
    throw new GatewayError("stream_reset", "The stream was reset again and again.", { retriable: true });
  }

  forget() {
    this.message.text = "";
    unmark(this.message);
    this.message.cursor = BEGINNING;
    this.message.revision += 1;
  }

  accepted(id) {
    this.isResuming = false;
    if (this.message.status === "starting") this.message.status = "running";
    this.message.stream = id;
    this.noteJourney();
    this.save();
    for (const input of waiting(this.message)) this.tell(input);
    this.onChange(this);
  }

  /** Adds the user's text to the running answer. */
  add(text) {
    const input = { id: randomId(), text, result: "sent" };
    (this.message.inputs ??= []).push(input);
    if (this.message.stream) this.tell(input);
    this.save();
    this.onChange(this);
  }

  /** Sends an input; its id stays the same over reloads, so that it is added once. */
  async tell(input) {
    try {
      const { result } = await this.gateway.input(this.message.stream, input.text, { id: input.id });
      if (result !== "terminal" || input.result !== "sent") return;
      refuse(input, "ended");
    } catch (error) {
      if (OURS.has(error.code) || input.result !== "sent") return;
      refuse(input, `Not added: ${error.message}`);
    }
    this.save();
    this.onChange(this);
  }

  apply({ chunks, cursor }) {
    const { message } = this;
    this.noteJourney();
    const text = textOf(chunks);
    if (text) this.time();
    message.cursor = cursor;
    for (const chunk of chunks) {
      const { model, system_fingerprint: fingerprint, choices } = chunk;
      const added = textOf([chunk]);
      for (const { at, ...input } of chunk.inputs ?? []) mark(message, input, message.text.length + indexOf(added, at));
      message.text += added;
      if (chunk.input) mark(message, chunk.input, message.text.length);
      message.model = model ?? message.model;
      message.fingerprint = fingerprint ?? message.fingerprint;
      for (const { index, finish_reason: finish, stop_reason: stopReason } of choices ?? []) {
        if (index === 0 && finish) Object.assign(message, { finish, stopReason });
      }
    }
    this.saveTimer ??= setTimeout(() => this.save(), SAVE_MS);
    this.onChange(this);
  }

  // Times are measured only where nothing was lost on the way: a replay is faster than the model

  time() {
    this.lastAt = performance.now();
    if (this.firstAt !== null) return;
    this.firstAt = this.lastAt;
    if (this.askedAt !== null && this.stream.attachments <= 1) this.message.firstMs = Math.round(this.firstAt - this.askedAt);
  }

  measure() {
    const { message, firstAt, lastAt } = this;
    const tokens = message.usage?.output;
    const wasWhole = this.askedAt !== null && this.restarts === 0 && this.stream?.attachments === 1;
    if (!wasWhole || !(tokens > 1) || firstAt === null || lastAt - firstAt < SPEED_MS_MIN) return;
    message.perS = ((tokens - 1) * 1000) / (lastAt - firstAt);
  }

  /** Notes when another replica produces the stream, or another gateway delivers it. */
  noteJourney() {
    const { message, stream } = this;
    if (stream.epoch > (message.epoch ?? 1)) message.takeover = message.text === "" && message.epoch ? "restarted" : "continued";
    if (stream.gatewayId && message.gateway && stream.gatewayId !== message.gateway) message.movedGateway = true;
    message.epoch = stream.epoch;
    message.gateway = stream.gatewayId ?? message.gateway;
  }

  save() {
    clearTimeout(this.saveTimer);
    this.saveTimer = null;
    merge(this.message, this.store.message?.(this.message.id));
    this.store.save(this.message);
  }

  async stop() {
    this.isStopping = true; // shown at once, because the gateway's answer waits for a connection
    this.isAbandoned = this.stream === null;
    this.onChange(this);
    if (this.isAbandoned) this.abandon();
    await this.stream?.cancel();
  }
}
