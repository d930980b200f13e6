// The view of an answer's text: Markdown, cut where the user's inputs were applied, with each input in its place.

import { el } from "../dom.js";
import { MarkdownView } from "../markdown.js";
import { parts, refused, waiting } from "./inputs.js";

export class AnswerBody {
  /** Puts its nodes before `end`. `onSend(text)` sends a refused input as a message of its own; null: it cannot. */
  constructor(end, onSend) {
    Object.assign(this, { end, onSend });
    this.texts = []; // {content, markdown, inputs}
    this.tail = el("div", "unapplied");
    end.before(this.tail);
    this.shown = "";
    this.set({ text: "" }, true);
  }

  /** `runs`: the answer still grows. */
  set(message, runs) {
    const found = parts(message);
    while (this.texts.length > found.length) this.remove(this.texts.pop());
    for (const [at, { text, inputs }] of found.entries()) {
      this.texts[at] ??= this.add();
      const each = this.texts[at];
      const isLast = at === found.length - 1;
      each.markdown.set(text);
      if (!runs || !isLast) each.markdown.finish();
      each.content.classList.toggle("awaiting", runs && isLast && text === "");
      each.content.classList.toggle("growing", runs && isLast);
      this.showInputs(each, inputs);
    }
    this.showUnapplied(message, runs);
  }

  add() {
    const content = el("div", "content");
    const inputs = el("div", "inputs");
    this.tail.before(content, inputs);
    return { content, inputs, markdown: new MarkdownView(content), shown: "" };
  }

  remove({ content, inputs }) {
    content.remove();
    inputs.remove();
  }

  showInputs(each, inputs) {
    const state = JSON.stringify(inputs);
    if (state === each.shown) return;
    each.shown = state;
    each.inputs.replaceChildren(...inputs.map((input) => inputNode(input)));
  }

  /** Inputs that wait for their place, and those that got none. */
  showUnapplied(message, runs) {
    const left = [...refused(message), ...waiting(message)];
    const state = JSON.stringify([left, runs]);
    if (state === this.shown) return;
    this.shown = state;
    this.tail.replaceChildren(...left.map((input) => this.unappliedNode(input, runs)));
  }

  unappliedNode(input, runs) {
    const node = inputNode(input);
    if (input.result === "sent") {
      node.classList.add("sent");
      node.append(el("small", "", "Adding to the answer…"));
      return node;
    }
    const told = el("small", "", input.reason);
    node.append(told);
    if (!runs && this.onSend && input.text) {
      const send = el("button", "idle", "Send as a message");
      send.type = "button";
      send.addEventListener("click", () => this.onSend(input.id));
      told.append(" ", send);
    }
    return node;
  }
}

function inputNode({ text }) {
  const said = el("p", text ? "" : "unknown", text || "Something was added to the answer here.");
  said.dir = "auto";
  const node = el("div", "input", said);
  node.setAttribute("role", "group");
  node.setAttribute("aria-label", "You, while the answer ran");
  return node;
}
