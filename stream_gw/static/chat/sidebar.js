// The list of conversations: search, rename, delete with undo.

import { $, el, iconButton } from "../dom.js";
import { UNDO_MS } from "./store.js";

const TITLE_CHARS = 80;

export class Sidebar {
  /** `onOpen(id)` shows a conversation, `onGone(id)` tells that it was deleted, `onChange()` that a title is new. */
  constructor({ store, onOpen, onGone, onChange, onPurge }) {
    Object.assign(this, { store, onOpen, onGone, onChange, onPurge });
    this.current = null;
    this.renaming = null; // id of the conversation whose title is edited
    this.timer = null;
    $("search").addEventListener("input", () => this.show(this.current));
    $("search").addEventListener("keydown", (event) => this.searchKey(event));
    $("undo").addEventListener("click", () => this.undo());
    $("menu").addEventListener("click", () => this.open(!document.body.classList.contains("sidebar-open")));
    $("scrim").addEventListener("click", () => this.open(false));
  }

  get isOpen() {
    return document.body.classList.contains("sidebar-open");
  }

  /** Opens or closes it where the page is too narrow to show it always. */
  open(open) {
    document.body.classList.toggle("sidebar-open", open);
    $("menu").setAttribute("aria-expanded", String(open));
    $("scrim").hidden = !open;
    if (open) $("new").focus();
  }

  show(current) {
    this.current = current;
    const words = $("search").value;
    const found = this.store.search(words);
    $("conversations").replaceChildren(...found.map((entry) => this.item(entry)));
    $("none").hidden = found.length > 0 || !words.trim();
  }

  item({ id, title, excerpt }) {
    if (id === this.renaming) return el("li", "", this.titleField(id, title));
    const open = el("button", "row", title);
    open.type = "button";
    open.dir = "auto";
    if (id === this.current) open.setAttribute("aria-current", "true");
    if (excerpt) open.append(el("small", "", excerpt));
    open.addEventListener("click", () => {
      this.onOpen(id);
      this.open(false);
    });
    open.addEventListener("dblclick", () => this.rename(id));
    const tools = el(
      "span",
      "tools",
      iconButton("edit", `Rename “${title}”`, () => this.rename(id), "icon rename"),
      iconButton("trash", `Delete “${title}”`, () => this.remove(id, title), "icon remove"),
    );
    return el("li", "", open, tools);
  }

  rename(id) {
    this.renaming = id;
    this.show(this.current);
    const field = $("conversations").querySelector("input");
    field.focus();
    field.select();
  }

  titleField(id, title) {
    const field = el("input", "row");
    field.value = title;
    field.maxLength = TITLE_CHARS;
    field.setAttribute("aria-label", "Title of the conversation");
    const finish = (keep) => {
      if (this.renaming !== id) return;
      this.renaming = null;
      const given = field.value.trim();
      if (keep && given && given !== title) this.store.rename(id, given);
      this.show(this.current);
      this.onChange();
    };
    field.addEventListener("blur", () => finish(true));
    field.addEventListener("keydown", (event) => {
      if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
      event.preventDefault();
      event.stopPropagation();
      finish(event.key === "Enter");
      $("conversations").querySelector("[aria-current]")?.focus();
    });
    return field;
  }

  searchKey(event) {
    if (event.key !== "Escape" || !$("search").value) return;
    event.stopPropagation();
    $("search").value = "";
    this.show(this.current);
  }

  // Delete and undo

  remove(id, title) {
    this.store.remove(id);
    this.undoable = id;
    $("deleted").textContent = `“${title}” is deleted.`;
    $("toast").hidden = false;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.purge(), UNDO_MS + 100);
    this.onGone(id);
    $("undo").focus({ preventScroll: true });
  }

  undo() {
    clearTimeout(this.timer);
    $("toast").hidden = true;
    if (this.store.restore(this.undoable)) this.onOpen(this.undoable);
    this.purgeLater();
    $("prompt").focus();
  }

  purge() {
    if ($("toast").contains(document.activeElement)) $("prompt").focus();
    $("toast").hidden = true;
    this.onPurge(this.store.purge());
    this.purgeLater();
  }

  /** Conversations that were deleted one after another, or in another tab, each have their own time. */
  purgeLater() {
    clearTimeout(this.timer);
    if (this.store.deleted().length > 0) this.timer = setTimeout(() => this.purge(), UNDO_MS + 100);
  }
}
