// The view of one message: its text, what is said about it, and its buttons. A prompt is shown as text; an answer is
// Markdown (markdown.js).

import { copyText, el, icon, iconButton } from "../dom.js";
import { AnswerBody } from "./body.js";
import { ending, figures, hindrance, journey } from "./endings.js";
import { Editor } from "./editor.js";
import { markdownOf } from "./inputs.js";
import { isRunning } from "./store.js";

const PAUSE_MS_MAX = 1000;
const COPIED_MS = 1600;

export class MessageView {
  /**
   * `actions` has the handlers of the buttons that this message has: retry, regenerate, edit(text), choose(id), share;
   * and imageUrl(id), which returns an image's address; sendInput(id) sends an input that was not added as a message.
   */
  constructor(message, actions) {
    this.actions = actions;
    this.message = message;
    this.isUser = message.role === "user";
    this.node = el("article", message.role);
    this.node.dataset.id = message.id;
    this.node.setAttribute("aria-label", this.isUser ? "You" : "Answer");
    this.note = el("div", "note");
    this.meta = el("div", "meta");
    this.buttons = el("div", "actions");
    this.node.append(this.note, this.meta, this.buttons);
    if (this.isUser) this.showPrompt();
    else this.body = new AnswerBody(this.note, actions.sendInput ?? null);
    this.makeButtons();
    this.isStopping = false;
    this.place = null; // in the queue
    this.link = "connected"; // the connection's state, which a running answer tells where its text is
    this.frame = 0;
    this.costMs = 0;
    this.shownAt = 0;
    this.update(message);
  }

  showPrompt() {
    const { text, images } = this.message;
    this.content = el("div", "content");
    this.note.before(this.content);
    this.content.textContent = text;
    this.content.dir = "auto";
    if (!images?.length) return;
    const strip = el("div", "images");
    for (const { id, name } of images) {
      const image = el("img");
      image.alt = name;
      this.actions.imageUrl(id).then((url) => {
        if (url) image.src = url;
        else image.replaceWith(el("span", "lost", `${name} is no longer stored here`));
      });
      strip.append(image);
    }
    this.content.before(strip);
  }

  makeButtons() {
    const { actions } = this;
    if (!this.isUser || this.message.text) {
      this.copy = iconButton("copy", "Copy the message", () => this.copyText());
      this.buttons.append(this.copy);
    }
    if (actions.edit) this.buttons.append(iconButton("edit", "Edit the message", () => this.edit(), "idle"));
    if (actions.regenerate) this.buttons.append(iconButton("again", "Answer again", actions.regenerate, "idle"));
    if (actions.share) {
      this.share = iconButton("share", "Share this live answer", actions.share);
      this.share.append(el("span", "", "Share"));
      this.share.classList.add("share");
      this.buttons.append(this.share);
    }
    this.pager = el("span", "pager");
    this.buttons.append(this.pager);
  }

  /** Shows which version of the message this is, and the way to the others. */
  setVersions(ids) {
    const told = ids.join();
    if (told === this.versions) return;
    this.versions = told;
    const at = ids.indexOf(this.message.id);
    this.pager.hidden = ids.length < 2;
    if (ids.length < 2) return;
    const step = (name, label, to) => {
      const button = iconButton(name, label, () => this.actions.choose(ids[to]), "idle");
      button.disabled = to < 0 || to >= ids.length;
      return button;
    };
    const count = el("span", "", `${at + 1} / ${ids.length}`);
    this.pager.replaceChildren(step("left", "Previous version", at - 1), count, step("right", "Next version", at + 1));
  }

  async copyText() {
    const copied = await copyText(markdownOf(this.message));
    this.copy.setAttribute("aria-label", copied ? "Copied" : "Copying is not allowed here");
    this.copy.title = this.copy.getAttribute("aria-label");
    this.copy.replaceChildren(icon(copied ? "check" : "alert"));
    setTimeout(() => {
      this.copy.setAttribute("aria-label", "Copy the message");
      this.copy.title = "Copy the message";
      this.copy.replaceChildren(icon("copy"));
    }, COPIED_MS);
  }

  edit() {
    if (this.editor) return;
    this.editor = new Editor(this.message.text, (text) => {
      this.editor.node.remove();
      this.editor = null;
      this.node.classList.remove("editing");
      if (text === null) this.buttons.querySelector("button")?.focus();
      else this.actions.edit(text);
    });
    this.node.classList.add("editing");
    this.content.after(this.editor.node);
    this.editor.focus();
  }

  /**
   * Shows the message at the next frame, then calls `after`. After a slow rendering, pauses for ten times the duration
   * of both, but never long: a rendering also takes long when the machine stopped for a while.
   */
  schedule(message, after) {
    this.message = message;
    if (this.frame) return;
    const draw = () => {
      if (performance.now() - this.shownAt < Math.min(this.costMs * 10, PAUSE_MS_MAX)) {
        this.frame = requestAnimationFrame(draw);
        return;
      }
      this.frame = 0;
      const started = performance.now();
      this.update(this.message);
      after(); // scrolls, for which the browser makes the layout: in a long answer the dearest part
      this.shownAt = performance.now();
      this.costMs = this.shownAt - started;
    };
    this.frame = requestAnimationFrame(draw);
  }

  update(message) {
    this.message = message;
    if (this.isUser) return;
    const runs = isRunning(message);
    this.body.set(message, runs);
    // A screen reader reads the answer once it is complete, not token by token.
    this.node.setAttribute("aria-busy", String(runs));
    this.node.classList.toggle("waiting", runs && message.text === "");
    this.node.classList.toggle("running", runs && message.text !== "");
    if (this.share) this.share.hidden = !runs || !message.stream;
    this.showNote(message);
    this.showMeta(message);
  }

  setLink(state) {
    this.link = state;
    if (!this.isUser) this.showNote(this.message);
  }

  showNote(message) {
    const held = this.isStopping ? "Stopping…" : hindrance(message, this.link, this.place);
    const state = [message.status, message.hasGap, held, ending(message), message.error?.message].join("\n");
    if (state === this.noted) return;
    this.noted = state;
    this.note.replaceChildren();
    this.note.classList.toggle("failed", message.status === "failed");
    this.note.classList.toggle("held", Boolean(held) && !this.isStopping);
    if (message.status === "failed") this.showError(message);
    else this.note.append(held || ending(message));
    if (message.hasGap) this.note.append(" A part of this answer was lost and cannot be recovered.");
  }

  showMeta(message) {
    const told = [...(isRunning(message) ? [] : figures(message)), ...journey(message)];
    const text = told.join("\n");
    if (text === this.told) return;
    this.told = text;
    this.meta.replaceChildren(...told.map((each) => el("span", "", each)));
  }

  showError({ error }) {
    const code = el("code", "", error.code);
    this.note.append(icon("alert"), el("span", "", error.message), code);
    if (!this.actions.retry) return;
    const retry = el("button", "", "Try again");
    retry.type = "button";
    retry.addEventListener("click", this.actions.retry);
    this.note.append(retry);
  }
}
