// The branches of a conversation. Each message has a parent; an edit or a regeneration adds a sibling. `chosen` names
// the sibling that is shown. A conversation of an earlier release has no parents: its messages follow one another.

const ROOT = "";

function parentsOf(conversation) {
  conversation.parents ??= Object.fromEntries(conversation.messages.map((id, at) => [id, conversation.messages[at - 1] ?? ROOT]));
  conversation.chosen ??= {};
  return conversation.parents;
}

function childrenOf(conversation, parent) {
  const parents = parentsOf(conversation);
  return conversation.messages.filter((id) => parents[id] === parent);
}

/** Ids of the messages shown, from the first to the last. */
export function path(conversation) {
  const shown = [];
  for (let at = ROOT; ; ) {
    const children = childrenOf(conversation, at);
    if (children.length === 0) return shown;
    const chosen = conversation.chosen[at];
    at = children.includes(chosen) ? chosen : children.at(-1);
    shown.push(at);
  }
}

/** Ids of the messages before this one on its own branch. */
export function before(conversation, id) {
  const parents = parentsOf(conversation);
  const found = [];
  for (let at = parents[id]; at; at = parents[at]) found.unshift(at);
  return found;
}

/** Ids of the versions of a message, itself included. */
export function siblings(conversation, id) {
  return childrenOf(conversation, parentsOf(conversation)[id]);
}

/** Adds messages one after another below `parent` (null: at the beginning), and shows them. */
export function append(conversation, parent, ids) {
  const parents = parentsOf(conversation);
  let at = parent ?? ROOT;
  for (const id of ids) {
    conversation.messages.push(id);
    parents[id] = at;
    conversation.chosen[at] = id;
    at = id;
  }
}

/** Shows another version of a message. */
export function choose(conversation, id) {
  const parent = parentsOf(conversation)[id];
  conversation.chosen[parent] = id;
}

/** Removes a message that has no messages below it. */
export function remove(conversation, id) {
  const parents = parentsOf(conversation);
  conversation.messages = conversation.messages.filter((each) => each !== id);
  delete parents[id];
}

/** The id of the message that this one answers or follows; null: it is the first. */
export function parent(conversation, id) {
  return parentsOf(conversation)[id] || null;
}
