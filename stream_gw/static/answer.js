// One running answer: reads its stream into a message and stores the message's text and cursor together, so that a
// reload, another tab or a new socket continues at the same position.

import { BEGINNING, GatewayError, textOf } from "./client.js";

const SAVE_MS = 250;
const RESTARTABLE = new Set(["cursor_gone", "cursor_invalid"]);
const RESTARTS_MAX = 3;
// Errors that end reading but not the stream: it stays stored as running, for another tab or the next sign-in.
const OURS = new Set(["client_closed", "not_signed_in", "invalid_api_key", "forbidden"]);

export class Answer {
  /** `onChange(answer)` tells that the message grew or ended. */
  constructor({ gateway, store, message, body, onChange }) {
    Object.assign(this, { gateway, store, message, body, onChange });
    this.stream = null;
    this.saveTimer = null;
    this.restarts = 0;
    this.isResuming = Boolean(message.stream);
    this.isOver = false;
    this.isStopping = false;
    this.ended = this.run();
  }

  async run() {
    const { message } = this;
    try {
      let outcome = await this.read(message.cursor, "tokens");
      // The position is gone, but the stream may still be readable from its beginning.
      while (outcome === "restart") outcome = await this.read(BEGINNING, "snapshot");
      message.status = outcome;
    } catch (error) {
      if (!OURS.has(error.code)) message.status = "failed";
      message.error = { code: error.code ?? "error", message: error.message, retriable: error.retriable === true };
    }
    this.isResuming = false;
    this.isOver = true;
    this.save();
    this.onChange(this);
  }

  async read(after, mode) {
    const { gateway, message } = this;
    const stream = message.stream
      ? gateway.subscribe(message.stream, { after, mode })
      : gateway.create(this.body, { key: message.key, mode });
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
        else this.apply(item);
      }
    } catch (error) {
      if (!RESTARTABLE.has(error.code) || this.restarts > 0) throw error;
      return this.restart();
    }
    message.cursor = stream.cursor;
    message.usage = stream.usage;
    return stream.status;
  }

  restart() {
    this.restarts += 1;
    this.stream.close();
    if (this.restarts <= RESTARTS_MAX) return "restart";
    throw new GatewayError("stream_reset", "The stream was reset again and again.", { retriable: true });
  }

  forget() {
    this.message.text = "";
    this.message.cursor = BEGINNING;
    this.message.revision += 1;
  }

  accepted(id) {
    this.isResuming = false;
    if (this.message.status === "starting") this.message.status = "running";
    this.message.stream = id;
    this.save();
    this.onChange(this);
  }

  apply({ chunks, cursor }) {
    const { message } = this;
    message.text += textOf(chunks);
    message.cursor = cursor;
    for (const { model, system_fingerprint: fingerprint } of chunks) {
      message.model = model ?? message.model;
      message.fingerprint = fingerprint ?? message.fingerprint;
    }
    this.saveTimer ??= setTimeout(() => this.save(), SAVE_MS);
    this.onChange(this);
  }

  save() {
    clearTimeout(this.saveTimer);
    this.saveTimer = null;
    this.store.save(this.message);
  }

  async stop() {
    this.isStopping = true; // shown at once, because the gateway's answer waits for a connection
    this.onChange(this);
    await this.stream.cancel();
  }
}
