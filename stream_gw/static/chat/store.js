// Conversations in localStorage, shared by the tabs of this browser. Each message has its own entry, so that a
// growing answer is written alone and two tabs that write at once overwrite no other message.

import { randomId } from "../client.js";
import { isFull, local } from "../storage.js";
import * as tree from "./tree.js";

const INDEX = "sgw.index";
const DELETED = "sgw.deleted";
const CONVERSATIONS_MAX = 40; // over: the oldest is dropped
export const UNDO_MS = 8_000; // a deleted conversation can be restored for so long
const conversationKey = (id) => `sgw.conversation.${id}`;
const messageKey = (id) => `sgw.message.${id}`;

export const isRunning = (message) => message.status === "starting" || message.status === "running";

const seqOf = (message) => Number((message.cursor ?? "1-0").split("-")[1]);

/** Whether `mine` is no older than what is stored: tabs follow the same answer and any of them may be ahead. */
function isAhead(mine, stored) {
  if (mine.revision !== stored.revision) return mine.revision > stored.revision;
  if (isRunning(mine) !== isRunning(stored)) return !isRunning(mine);
  return seqOf(mine) >= seqOf(stored);
}

export class Store {
  /**
   * `onChange({conversation, message})` tells of another tab's write, `onFull()` that nothing more can be kept,
   * `onErased(message)` that a message is gone.
   */
  constructor({ onChange, onFull, onErased }) {
    Object.assign(this, { onFull, onErased });
    this.unkept = new Map(); // entries that did not fit into localStorage; only this tab has them
    addEventListener("storage", ({ key }) => {
      if (key === null || key === INDEX) onChange({});
      else if (key.startsWith("sgw.conversation.")) onChange({ conversation: key.slice("sgw.conversation.".length) });
      else if (key.startsWith("sgw.message.")) onChange({ message: key.slice("sgw.message.".length) });
    });
  }

  list() {
    return this.read(INDEX) ?? [];
  }

  conversation(id) {
    return this.read(conversationKey(id));
  }

  message(id) {
    return this.read(messageKey(id));
  }

  /** The messages of the branch that is shown. */
  shown(conversation) {
    return this.messages(tree.path(conversation));
  }

  messages(ids) {
    return ids.map((id) => this.message(id)).filter(Boolean);
  }

  newConversation(title, settings) {
    const conversation = { id: randomId(), title, settings, messages: [], parents: {}, chosen: {} };
    this.write(conversationKey(conversation.id), conversation);
    const index = [{ id: conversation.id, title }, ...this.list()];
    for (const { id } of index.splice(CONVERSATIONS_MAX)) this.drop(id);
    this.write(INDEX, index);
    return conversation;
  }

  /** Adds messages below `parent` (null: at the beginning), and shows them. */
  add(conversationId, parent, messages) {
    const ids = messages.map(({ id }) => id);
    this.change(conversationId, (conversation) => tree.append(conversation, parent, ids));
    for (const message of messages) this.write(messageKey(message.id), message);
  }

  /** Puts a new message in the place of one that failed. */
  replace(conversationId, old, message) {
    const parent = tree.parent(this.conversation(conversationId), old);
    this.change(conversationId, (conversation) => tree.remove(conversation, old));
    this.add(conversationId, parent, [message]);
    this.eraseMessage(old);
  }

  change(conversationId, edit) {
    const conversation = this.conversation(conversationId);
    if (!conversation) return;
    edit(conversation);
    this.write(conversationKey(conversationId), conversation);
  }

  rename(conversationId, title) {
    this.change(conversationId, (conversation) => Object.assign(conversation, { title }));
    this.write(INDEX, this.list().map((each) => (each.id === conversationId ? { ...each, title } : each)));
  }

  /** Writes a message that is still there: one deleted meanwhile stays deleted. */
  save(message) {
    const stored = this.message(message.id);
    if (stored && isAhead(message, stored)) this.write(messageKey(message.id), message);
  }

  /** Conversations whose title or text has these words. Where the title lacks them, with the text around the first. */
  search(words) {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    if (wanted.length === 0) return this.list();
    return this.list().flatMap((entry) => {
      const texts = this.messages(this.conversation(entry.id)?.messages ?? []).map(({ text }) => text);
      const all = [entry.title, ...texts].join("\n").toLowerCase();
      if (!wanted.every((word) => all.includes(word))) return [];
      const inTitle = wanted.every((word) => entry.title.toLowerCase().includes(word));
      return [inTitle ? entry : { ...entry, excerpt: excerptOf(texts, wanted[0]) }];
    });
  }

  // Deleting: the conversation leaves the list at once, and its messages stay until it cannot be restored any more

  remove(conversationId) {
    const place = this.list().findIndex(({ id }) => id === conversationId);
    if (place < 0) return;
    const entry = this.list()[place];
    this.write(DELETED, [...this.deleted(), { entry, place, at: Date.now() }]);
    this.write(INDEX, this.list().filter(({ id }) => id !== conversationId));
  }

  deleted() {
    return this.read(DELETED) ?? [];
  }

  restore(conversationId) {
    const found = this.deleted().find(({ entry }) => entry.id === conversationId);
    if (!found || !this.conversation(conversationId)) return false;
    this.write(DELETED, this.deleted().filter(({ entry }) => entry.id !== conversationId));
    this.write(INDEX, this.list().toSpliced(found.place, 0, found.entry));
    return true;
  }

  /** Removes for good what was deleted long enough ago, and returns its messages. */
  purge() {
    const isOver = ({ at }) => Date.now() - at >= UNDO_MS;
    const over = this.deleted().filter(isOver);
    if (over.length === 0) return [];
    const messages = over.flatMap(({ entry }) => this.messages(this.conversation(entry.id)?.messages ?? []));
    for (const { entry } of over) this.drop(entry.id);
    const left = this.deleted().filter((each) => !isOver(each));
    if (left.length > 0) this.write(DELETED, left);
    else this.erase(DELETED);
    return messages;
  }

  drop(id) {
    for (const messageId of this.conversation(id)?.messages ?? []) this.eraseMessage(messageId);
    this.erase(conversationKey(id));
  }

  eraseMessage(id) {
    const message = this.message(id);
    this.erase(messageKey(id));
    if (message) this.onErased(message);
  }

  read(key) {
    const text = this.unkept.get(key) ?? local.getItem(key);
    return text === null ? null : JSON.parse(text);
  }

  erase(key) {
    this.unkept.delete(key);
    local.removeItem(key);
  }

  write(key, value) {
    for (;;) {
      const text = JSON.stringify(value);
      try {
        local.setItem(key, text);
        this.unkept.delete(key);
        return;
      } catch (error) {
        if (!isFull(error)) throw error;
        // localStorage is full: drop the oldest conversation, unless this one is the only one.
        const spare = this.list().findLast(({ id }) => !this.holds(id, key));
        if (!spare) {
          this.unkept.set(key, text);
          this.onFull();
          return;
        }
        this.drop(spare.id);
        const isKept = ({ id }) => id !== spare.id;
        if (key === INDEX) value = value.filter(isKept);
        this.write(INDEX, this.list().filter(isKept));
      }
    }
  }

  holds(id, key) {
    return key === conversationKey(id) || Boolean(this.conversation(id)?.messages.some((each) => messageKey(each) === key));
  }
}

const EXCERPT_CHARS = 60;

function excerptOf(texts, word) {
  for (const text of texts) {
    const at = text.toLowerCase().indexOf(word);
    if (at < 0) continue;
    const from = Math.max(0, at - 16);
    return `${from > 0 ? "…" : ""}${text.slice(from, from + EXCERPT_CHARS).replace(/\s+/g, " ")}`;
  }
  return "";
}
