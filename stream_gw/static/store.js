// Conversations in localStorage, shared by the tabs of this browser. Each message has its own entry, so that a
// growing answer is written alone and two tabs that write at once overwrite no other message.

import { randomId } from "./client.js";

const INDEX = "sgw.index";
const CONVERSATIONS_MAX = 40; // over: the oldest is dropped
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
  /** `onChange({conversation, message})` tells of another tab's write, `onFull()` that nothing more can be kept. */
  constructor(onChange, onFull) {
    this.onFull = onFull;
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

  messages(conversation) {
    return conversation.messages.map((id) => this.message(id)).filter(Boolean);
  }

  newConversation(title) {
    const conversation = { id: randomId(), title, messages: [] };
    this.write(conversationKey(conversation.id), conversation);
    const index = [{ id: conversation.id, title }, ...this.list()];
    for (const { id } of index.splice(CONVERSATIONS_MAX)) this.drop(id);
    this.write(INDEX, index);
    return conversation;
  }

  /** Adds messages, in place of the one with the id `instead` when given. */
  add(conversationId, messages, instead = null) {
    const conversation = this.conversation(conversationId);
    const kept = conversation.messages.filter((id) => id !== instead);
    conversation.messages = [...kept, ...messages.map((message) => message.id)];
    this.write(conversationKey(conversationId), conversation);
    for (const message of messages) this.write(messageKey(message.id), message);
    if (instead) this.erase(messageKey(instead));
  }

  /** Writes a message that is still there: one deleted meanwhile stays deleted. */
  save(message) {
    const stored = this.message(message.id);
    if (stored && isAhead(message, stored)) this.write(messageKey(message.id), message);
  }

  remove(conversationId) {
    this.drop(conversationId);
    this.write(INDEX, this.list().filter(({ id }) => id !== conversationId));
  }

  drop(id) {
    for (const messageId of this.conversation(id)?.messages ?? []) this.erase(messageKey(messageId));
    this.erase(conversationKey(id));
  }

  read(key) {
    const text = this.unkept.get(key) ?? localStorage.getItem(key);
    return text === null ? null : JSON.parse(text);
  }

  erase(key) {
    this.unkept.delete(key);
    localStorage.removeItem(key);
  }

  write(key, value) {
    for (;;) {
      const text = JSON.stringify(value);
      try {
        localStorage.setItem(key, text);
        this.unkept.delete(key);
        return;
      } catch (error) {
        if (error.name !== "QuotaExceededError") throw error;
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
