// Edits the text of a prompt in its place. Enter sends, Shift+Enter makes a new line, Escape leaves it as it was.

import { el } from "../dom.js";

export class Editor {
  /** `onDone(text)` gets the new text, or null when nothing shall change. */
  constructor(text, onDone) {
    this.onDone = onDone;
    this.field = el("textarea");
    this.field.value = text;
    this.field.dir = "auto";
    this.field.setAttribute("aria-label", "Edit the message");
    const send = el("button", "primary", "Send");
    send.type = "submit";
    const leave = el("button", "quiet", "Cancel");
    leave.type = "button";
    leave.addEventListener("click", () => onDone(null));
    const hint = el("span", "", "The version before is kept.");
    this.node = el("form", "editor", this.field, el("div", "", hint, leave, send));
    this.node.addEventListener("submit", (event) => {
      event.preventDefault();
      const edited = this.field.value.trim();
      if (edited) onDone(edited);
    });
    this.field.addEventListener("input", () => this.fit());
    this.node.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    if (event.isComposing) return;
    if (event.key === "Escape") {
      event.stopPropagation(); // on the page it stops the answer
      this.onDone(null);
    } else if (event.key === "Enter" && !event.shiftKey && event.target === this.field) {
      event.preventDefault();
      this.node.requestSubmit();
    }
  }

  fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight}px`;
  }

  focus() {
    this.fit();
    this.field.focus();
    this.field.setSelectionRange(this.field.value.length, this.field.value.length);
  }
}
