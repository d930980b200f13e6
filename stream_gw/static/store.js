// Conversations in localStorage, shared by the tabs of this browser. A message has its own entry, so that a growing
// answer is written without its conversation and two tabs writing at once disturb no other message.

const INDEX = "sgw.index";
const CONVERSATIONS_MAX = 40; // over: the oldest is dropped
const conversationKey = (id) => `sgw.conversation.${id}`;
const messageKey = (id) => `sgw.message.${id}`;

export const isRunning = (message) => message.status === "starting" || message.status === "running";

function read(key) {
  const text = localStorage.getItem(key);
  return text === null ? null : JSON.parse(text);
}

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
    addEventListener("storage", ({ key }) => {
      if (key === null || key === INDEX) onChange({});
      else if (key.startsWith("sgw.conversation.")) onChange({ conversation: key.slice("sgw.conversation.".length) });
      else if (key.startsWith("sgw.message.")) onChange({ message: key.slice("sgw.message.".length) });
    });
  }

  list() {
    return read(INDEX) ?? [];
  }

  conversation(id) {
    return read(conversationKey(id));
  }

  message(id) {
    return read(messageKey(id));
  }

  messages(conversation) {
    return conversation.messages.map((id) => this.message(id)).filter(Boolean);
  }

  newConversation(title) {
    const conversation = { id: crypto.randomUUID(), title, messages: [] };
    this.write(conversationKey(conversation.id), conversation);
    const index = [{ id: conversation.id, title }, ...this.list()];
    for (const { id } of index.splice(CONVERSATIONS_MAX)) this.drop(id);
    this.write(INDEX, index);
    return conversation;
  }

  /** Adds messages, in place of the one with the id `instead` when given. */
  add(conversationId, messages, instead = null) {
    const conversation = this.conversation(conversationId);
    for (const message of messages) this.write(messageKey(message.id), message);
    const kept = conversation.messages.filter((id) => id !== instead);
    conversation.messages = [...kept, ...messages.map((message) => message.id)];
    this.write(conversationKey(conversationId), conversation);
    if (instead) localStorage.removeItem(messageKey(instead));
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

  drop(conversationId) {
    for (const id of this.conversation(conversationId)?.messages ?? []) localStorage.removeItem(messageKey(id));
    localStorage.removeItem(conversationKey(conversationId));
  }

  write(key, value) {
    const text = JSON.stringify(value);
    for (;;) {
      try {
        localStorage.setItem(key, text);
        return;
      } catch (error) {
        // The browser's share is used up: the oldest conversation goes, as long as there is another.
        if (error.name !== "QuotaExceededError") throw error;
        const index = this.list();
        if (index.length < 2) {
          this.onFull();
          return;
        }
        this.drop(index.at(-1).id);
        localStorage.setItem(INDEX, JSON.stringify(index.slice(0, -1)));
      }
    }
  }
}
