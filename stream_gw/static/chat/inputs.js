// Inputs of an answer: what the user adds while it is made. An input that was applied has a place `at` in the answer's
// text; the text after it is the next answer's. Another browser's inputs have no text here.
//
// An input is {id, text, result, at, reason}; result: "sent", "applied" or "refused".

const REASONS = {
  waits_for_tools: "Not added: the answer waits for the result of a tool.",
  ended: "Not added: the answer had ended.",
};

/** Records what became of an input. `at`: its place in the answer's text. */
export function mark(message, { id, result, reason }, at) {
  message.inputs ??= [];
  let input = message.inputs.find((each) => each.id === id);
  if (!input) message.inputs.push((input = { id, text: "" }));
  Object.assign(input, result === "applied" ? { result, at } : { result: "refused", reason: REASONS[reason] ?? "Not added: this answer takes no more." });
}

/** Puts inputs back to where they were before their results were read. */
export function unmark(message) {
  for (const input of message.inputs ?? []) if (input.result === "applied") Object.assign(input, { result: "sent", at: undefined });
}

export function refuse(input, reason) {
  Object.assign(input, { result: "refused", reason: REASONS[reason] ?? reason });
}

/** Takes over what another tab has stored of the same inputs. */
export function merge(message, stored) {
  for (const theirs of stored?.inputs ?? []) {
    const mine = message.inputs?.find(({ id }) => id === theirs.id);
    if (!mine) (message.inputs ??= []).push(theirs);
    else if (!mine.text) mine.text = theirs.text;
  }
}

export const waiting = (message) => (message.inputs ?? []).filter(({ result }) => result === "sent");
export const refused = (message) => (message.inputs ?? []).filter(({ result }) => result === "refused");

/** The answer's texts, each with the inputs that came after it. */
export function parts({ text, inputs = [] }) {
  const applied = inputs.filter(({ result }) => result === "applied").sort((a, b) => a.at - b.at);
  const found = [];
  let from = 0;
  for (const input of applied) {
    if (found.length > 0 && input.at === from) found.at(-1).inputs.push(input); // several at one place
    else found.push({ text: text.slice(from, input.at), inputs: [input] });
    from = input.at;
  }
  return [...found, { text: text.slice(from), inputs: [] }];
}

/** The index in a string that so many code points come before: gateways count these. */
export function indexOf(text, points) {
  let index = 0;
  for (const point of text) {
    if (points-- <= 0) break;
    index += point.length;
  }
  return index;
}

/** The answer as messages of a chat, for the request after it. */
export function turns(message) {
  const said = [];
  for (const { text, inputs } of parts(message)) {
    if (text) said.push({ role: "assistant", content: text });
    const added = inputs.map((input) => input.text).filter(Boolean).join("\n\n");
    if (added) said.push({ role: "user", content: added });
  }
  return said;
}

/** Joins messages of the user that follow one another: many models refuse two in a row. */
export function joined(messages) {
  const found = [];
  for (const message of messages) {
    const last = found.at(-1);
    const joins = last?.role === "user" && message.role === "user" && [last, message].every(({ content }) => typeof content === "string");
    if (joins) found[found.length - 1] = { role: "user", content: `${last.content}\n\n${message.content}` };
    else found.push(message);
  }
  return found;
}

/** The answer as Markdown, with the user's inputs as quotes. */
export function markdownOf(message) {
  const quote = (input) => input.text.replace(/^/gm, "> ");
  return parts(message)
    .flatMap(({ text, inputs }) => [text, ...inputs.filter((input) => input.text).map(quote)])
    .filter(Boolean)
    .join("\n\n");
}
