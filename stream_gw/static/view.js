// The view of one message. A prompt is shown as text; an answer is Markdown (markdown.js).

import { icon } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const PAUSE_MS_MAX = 1000;
const ENDINGS = {
  cancelled: "Stopped",
  incomplete: "Cut short by moderation or a budget",
};

export class MessageView {
  constructor(message, onRetry) {
    this.onRetry = onRetry;
    this.message = message;
    this.node = document.createElement("article");
    this.node.dataset.id = message.id;
    this.node.className = message.role;
    this.node.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
    this.content = document.createElement("div");
    this.content.className = "content";
    this.note = document.createElement("div");
    this.note.className = "note";
    this.node.append(this.content, this.note);
    if (message.role === "user") {
      this.content.textContent = message.text;
      this.content.dir = "auto";
    } else this.markdown = new MarkdownView(this.content);
    this.isStopping = false;
    this.frame = 0;
    this.costMs = 0;
    this.shownAt = 0;
    this.update(message);
  }

  /**
   * Shows the message at the next frame. After a slow rendering, pauses for ten times its duration, but never long: a
   * rendering also takes long when the machine stopped for a while.
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
      this.update(this.message);
      after();
    };
    this.frame = requestAnimationFrame(draw);
  }

  update(message) {
    this.message = message;
    if (message.role === "user") return;
    const started = performance.now();
    this.markdown.set(message.text);
    this.shownAt = performance.now();
    this.costMs = this.shownAt - started;
    const runs = message.status === "starting" || message.status === "running";
    // A screen reader reads the answer once it is complete, not token by token.
    this.node.setAttribute("aria-busy", String(runs));
    this.node.classList.toggle("waiting", runs && message.text === "");
    this.node.classList.toggle("running", runs && message.text !== "");
    this.showNote(message);
  }

  showNote(message) {
    const state = `${message.status} ${message.hasGap} ${this.isStopping}`;
    if (state === this.noted) return;
    this.noted = state;
    this.note.replaceChildren();
    this.note.classList.toggle("failed", message.status === "failed");
    if (message.status === "failed") this.showError(message);
    else if (this.isStopping) this.note.append("Stopping…");
    else if (ENDINGS[message.status]) this.note.append(ENDINGS[message.status]);
    if (message.hasGap) this.note.append(" A part of this answer was lost and cannot be recovered.");
  }

  showError({ error }) {
    const text = document.createElement("span");
    text.textContent = error.message;
    const code = document.createElement("code");
    code.textContent = error.code;
    const retry = document.createElement("button");
    retry.type = "button";
    retry.textContent = "Try again";
    retry.addEventListener("click", this.onRetry);
    this.note.append(icon("alert"), text, code, retry);
  }
}
