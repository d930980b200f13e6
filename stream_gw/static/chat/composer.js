// The message box: text, attached images, send and stop.

import { $, el, iconButton } from "../dom.js";
import { ACCEPT, IMAGES_MAX } from "./images.js";

const prompt = $("prompt");

export class Composer {
  /**
   * `onSend(text, images)` returns whether the message was taken, `onAdd(text)` whether the running answer takes it.
   * `onStop()` stops answers; `tell(text)` says what is wrong, "" that nothing is.
   */
  constructor({ images, onSend, onAdd, onStop, tell }) {
    Object.assign(this, { images, onSend, onAdd, onStop, tell });
    this.attached = []; // {id, name, url}
    this.takesImages = false;
    this.busy = this.stopping = false;
    this.adding = 0; // images that are being read
    this.sendsNext = false; // as soon as they are read
    $("files").accept = ACCEPT;
    prompt.addEventListener("input", () => {
      this.sendsNext = false; // the message goes on
      this.fit();
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      $("composer").requestSubmit();
    });
    prompt.addEventListener("paste", (event) => this.take(event, event.clipboardData.files));
    $("chat").addEventListener("dragover", (event) => {
      if (this.takesImages && event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    $("chat").addEventListener("drop", (event) => this.take(event, event.dataTransfer.files));
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    $("stop").addEventListener("click", () => {
      onStop();
      prompt.focus();
    });
    $("attach").addEventListener("click", () => $("files").click());
    $("files").addEventListener("change", ({ target }) => {
      this.attach([...target.files]);
      target.value = "";
    });
  }

  /** What the model takes, and whether an answer of this conversation runs. */
  show({ takesImages, busy, stopping }) {
    Object.assign(this, { takesImages, busy, stopping });
    prompt.placeholder = busy ? "Add to this answer" : "Message the model";
    $("send").setAttribute("aria-label", busy ? "Add to this answer" : "Send");
    $("attach").hidden = !takesImages;
    $("stop").hidden = !busy;
    $("stop").disabled = stopping;
    this.showStrip();
    this.enable();
  }

  enable() {
    const isEmpty = !prompt.value.trim() && this.sendable.length === 0;
    $("send").disabled = isEmpty || this.adding > 0;
    // While an answer runs, only text can be added to it: images wait for the next message
    $("send").hidden = this.busy && (!prompt.value.trim() || this.stopping);
  }

  /** Attachments go only to a model that takes them. */
  get sendable() {
    return this.takesImages ? this.attached : [];
  }

  fit() {
    prompt.style.height = "auto";
    prompt.style.height = `${prompt.scrollHeight}px`;
    this.enable();
  }

  submit() {
    const text = prompt.value.trim();
    if (this.busy) {
      if (!text || !this.onAdd(text)) return;
      prompt.value = "";
      this.fit();
      return;
    }
    if (this.adding > 0) {
      this.sendsNext = true;
      return;
    }
    if (!text && this.sendable.length === 0) return;
    const images = this.sendable.map(({ id, name }) => ({ id, name }));
    this.tell("");
    if (!this.onSend(text, images)) return;
    prompt.value = "";
    if (images.length > 0) this.attached = [];
    this.fit();
    this.showStrip();
  }

  take(event, files) {
    if (!this.takesImages || files.length === 0) return;
    event.preventDefault();
    this.attach([...files]);
  }

  async attach(files) {
    const room = IMAGES_MAX - this.attached.length - this.adding;
    if (files.length > room) this.tell(`A message holds at most ${IMAGES_MAX} images.`);
    else this.tell("");
    const taken = files.slice(0, Math.max(room, 0));
    this.adding += taken.length;
    this.enable();
    for (const file of taken) {
      try {
        this.attached.push(await this.images.add(file));
      } catch (error) {
        this.sendsNext = false;
        this.tell(error.message);
      }
      this.adding -= 1;
      this.showStrip();
    }
    this.enable();
    prompt.focus();
    if (this.sendsNext && this.adding === 0) {
      this.sendsNext = false;
      this.submit();
    }
  }

  showStrip() {
    $("attached").hidden = this.sendable.length === 0;
    $("attached").replaceChildren(
      ...this.sendable.map(({ id, name, url }) => {
        const image = el("img");
        image.src = url;
        image.alt = name;
        const remove = iconButton("close", `Remove ${name}`, () => this.detach(id));
        return el("li", "", image, remove);
      }),
    );
  }

  detach(id) {
    this.attached = this.attached.filter((each) => each.id !== id);
    this.images.remove([id]);
    this.showStrip();
    this.enable();
    prompt.focus();
  }
}
