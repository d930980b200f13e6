// The chat page: wires the session, the store, the client and the views.

import { BEGINNING, StreamGateway, randomId } from "../client.js";
import { $, themeButton } from "../dom.js";
import { Session } from "../session.js";
import { isDenied, local, remember, tab } from "../storage.js";
import { Answer } from "./answer.js";
import { Composer } from "./composer.js";
import { Reach, showConnection } from "./connection.js";
import { imageBudget, Images } from "./images.js";
import { joined, turns } from "./inputs.js";
import { Models } from "./models.js";
import { follow, scrollOn } from "./scroll.js";
import { bodyFields, SettingsDialog, showSettings, systemMessage } from "./settings.js";
import { ShareDialog } from "./share.js";
import { Sidebar } from "./sidebar.js";
import { Store, isRunning } from "./store.js";
import * as tree from "./tree.js";
import { MessageView } from "./view.js";

const TITLE_CHARS = 48;

const page = document.documentElement.dataset; // which part of the page is shown; shell.js has begun it
const session = new Session();
const images = new Images();
const store = new Store({
  onChange: onOtherTab,
  onFull: () => notify("This browser's storage is full: the conversation will not survive a reload."),
  onErased: (message) => images.remove((message.images ?? []).map(({ id }) => id)),
});
const models = new Models(refresh);
const sidebar = new Sidebar({ store, onOpen: show, onGone, onChange: showTitle, onPurge: stopErased });
const composer = new Composer({ images, onSend: send, onAdd: add, onStop: stop, tell: notify });
const settingsDialog = new SettingsDialog(saveSettings);
const shareDialog = new ShareDialog(session);
const answers = new Map(); // running answers by message id
const views = new Map(); // views of the branch shown by message id
let gateway = null;
let current = null; // id of the conversation shown
let newSettings = {}; // of a conversation that has no message yet
let connection = "idle";
let signIns = 0;
const reach = new Reach(() => onState(connection));

// Session

async function start() {
  const turn = signIns;
  if (session.key) open(); // stored conversations and the message box need no token
  try {
    await session.getToken();
  } catch (error) {
    if (turn !== signIns) return; // a sign-in that began meanwhile opens the page, or tells its own error
    // Without a network the client keeps trying.
    if (!error.retriable) {
      if (error.code === "invalid_api_key") session.signOut(); // or the next load would show the message box
      askForKey(error.code === "not_signed_in" ? "" : error.message);
      return;
    }
  }
  open();
}

/** Shows the "app" or the "gate". The page of an older gateway hides them by attribute. */
function showPart(part) {
  page.shows = part;
  for (const each of ["app", "gate"]) $(each).hidden = each !== part;
}

function open() {
  if (gateway) return;
  showPart("app");
  gateway = new StreamGateway({ url: location.origin, getToken: (request) => session.getToken(request), onState });
  gateway.connect();
  if (isDenied) notify("This browser stores nothing for this page: its conversations end when you leave it.");
  models.load(session, notify);
  sidebar.purge();
  show(tab.getItem("sgw.current") ?? local.getItem("sgw.last"));
  $("prompt").focus();
}

function askForKey(message) {
  gateway?.close();
  gateway = null;
  showPart("gate");
  $("sign-in-error").textContent = message;
  $("key").focus();
}

/** Takes over from shell.js, with what was sent before the modules came. */
function takeOver() {
  const form = page.sends && $(page.sends);
  page.ready = "";
  delete page.sends;
  composer.fit();
  if (!form) return;
  notify("");
  form.requestSubmit();
}

$("sign-in").addEventListener("submit", async (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  const button = event.submitter ?? $("sign-in").querySelector("button");
  if (!key) return;
  button.disabled = true;
  signIns += 1;
  try {
    await session.signIn(key);
    $("key").value = "";
    await start();
  } catch (error) {
    session.signOut();
    askForKey(error.message);
  } finally {
    button.disabled = false;
  }
});

$("sign-out").addEventListener("click", () => {
  session.signOut();
  askForKey("");
});

// Following a link with a key while the page is open does not reload the page.
addEventListener("hashchange", () => {
  if (new URLSearchParams(location.hash.slice(1)).has("key")) location.reload();
});

function onState(state, { error } = {}) {
  connection = reach.shown(state, error);
  refresh();
  if (state === "closed" && ["not_signed_in", "invalid_api_key", "forbidden"].includes(error?.code)) askForKey(error.message);
}

function announce(text) {
  $("announce").textContent = text;
}

/** Says what went wrong beside the message box, until the next message or "". */
function notify(text) {
  if ($("notice").textContent !== text) $("notice").textContent = text;
}

function tell(error) {
  notify(error.message);
}

// What the page shows

/** Shows a conversation, and follows its running answers. */
function show(id) {
  const conversation = id && store.list().some((each) => each.id === id) ? store.conversation(id) : null;
  if (conversation?.id !== current) {
    follow();
    composer.sendsNext = false; // it was meant for the other one
  }
  current = conversation?.id ?? null;
  newSettings = {};
  if (current) {
    tab.setItem("sgw.current", current);
    remember("sgw.last", current);
  } else tab.removeItem("sgw.current");
  views.clear();
  $("log").replaceChildren();
  if (conversation) showMessages(conversation);
  $("empty").hidden = Boolean(conversation);
  showTitle();
  sidebar.show(current);
  refresh();
  scrollOn();
}

function showTitle() {
  const conversation = current && store.conversation(current);
  document.title = conversation ? `${conversation.title} · stream-gw` : "stream-gw";
  $("title").textContent = conversation?.title ?? "";
  $("title").hidden = !conversation;
  showSettings(conversation ? conversation.settings : newSettings);
}

/** Updates the views from the store. `hides(message)` tells which messages are not shown yet. */
function showMessages(conversation, hides = () => false) {
  const messages = store.shown(conversation).filter((message) => !hides(message));
  const ids = new Set(messages.map(({ id }) => id));
  for (const [id, view] of views) {
    if (ids.has(id)) continue;
    view.node.remove();
    views.delete(id);
  }
  for (const stored of messages) {
    const message = answers.get(stored.id)?.message ?? stored;
    if (!views.has(message.id)) {
      const view = new MessageView(message, actionsOf(message));
      views.set(message.id, view);
      $("log").append(view.node);
    } else views.get(message.id).update(message);
    views.get(message.id).setVersions(tree.siblings(conversation, message.id));
  }
  // Also those of branches that are not shown: an answer without a reader is cancelled.
  for (const message of store.messages(conversation.messages)) {
    if (isRunning(message) && !hides(message) && !answers.has(message.id)) resume(conversation, message);
  }
}

function actionsOf({ id, role }) {
  const common = { choose, imageUrl: (image) => images.url(image) };
  if (role === "user") return { ...common, edit: (text) => edit(id, text) };
  const share = () => shareDialog.open(answers.get(id)?.message.stream ?? store.message(id).stream);
  const sendInput = (input) => sendAfter(id, input);
  return { ...common, retry: () => retry(id), regenerate: () => regenerate(id), share, sendInput };
}

const running = () => [...answers.values()].filter((answer) => views.has(answer.message.id));

function refresh() {
  const runs = running();
  composer.show({ takesImages: models.takesImages, busy: runs.length > 0, stopping: runs.every((answer) => answer.isStopping) });
  $("log").classList.toggle("busy", runs.length > 0);
  const resuming = connection !== "offline" && [...answers.values()].some((answer) => answer.isResuming);
  showConnection(resuming ? "resuming" : connection);
  for (const { message } of runs) views.get(message.id).setLink(connection);
  const last = [...views.values()].map((view) => view.message).findLast(({ role }) => role === "assistant");
  const names = last ? [last.model, last.fingerprint] : [models.chosen];
  $("simulated").hidden = !names.some((name) => /\bsim|sim\b|simulat/i.test(name ?? ""));
}

function onOtherTab({ message: messageId }) {
  if (!gateway) return;
  sidebar.show(current);
  if (!current) return;
  const conversation = store.conversation(current);
  if (!conversation || !store.list().some(({ id }) => id === current)) {
    show(null);
    return;
  }
  // This tab reads its answers itself; only a stream that the other tab has just created is new to it.
  const message = messageId ? store.message(messageId) : null;
  if (message && answers.has(messageId)) return;
  if (message?.status === "starting") return; // the tab that sent the request will announce the stream's id
  showMessages(conversation, ({ id, status }) => status === "starting" && !answers.has(id));
  showTitle();
  scrollOn();
  refresh();
}

// Answers

/** The request for an answer: the messages before it on its branch. The newest images come first to the limit. */
async function bodyOf(conversationId, answer) {
  if (!answer.model) {
    await models.loaded; // the prompt was sent before the list had come
    answer.model = models.chosen;
    store.save(answer);
  }
  const conversation = store.conversation(conversationId);
  const said = store
    .messages(tree.before(conversation, answer.id))
    .filter(({ role, text, images, inputs, status }) => (text || images?.length || inputs?.length) && (role === "user" || status !== "failed"));
  const budget = imageBudget();
  const messages = [];
  for (const message of said.toReversed()) {
    const content = message.images?.length ? await images.content(message, budget) : message.text;
    messages.unshift(...(message.role === "user" ? [{ role: message.role, content }] : turns(message)));
  }
  messages.unshift(...systemMessage(answer.settings));
  const { model, settings } = answer;
  return { model, messages: joined(messages), stream: true, stream_options: { include_usage: true }, session_id: conversationId, ...bodyFields(settings) };
}

/** Follows a running answer. Without a stream yet, its request is sent again with the same idempotency key. */
function resume(conversation, message) {
  if (!gateway) return;
  const makeBody = () => bodyOf(conversation.id, message);
  answers.set(message.id, new Answer({ gateway, store, message, makeBody, onChange: onAnswer }));
}

function onAnswer(answer) {
  const { message } = answer;
  const view = views.get(message.id);
  if (view) view.isStopping = answer.isStopping && !answer.isOver;
  if (view) view.place = answer.place;
  view?.schedule(message, scrollOn);
  const seen = `${answer.isOver} ${answer.isResuming} ${answer.isStopping} ${message.model} ${message.fingerprint}`;
  if (seen === answer.seen) return; // nothing but its text has changed
  answer.seen = seen;
  if (answer.isOver) {
    answers.delete(message.id);
    if (!isRunning(message) && views.has(message.id)) announce(message.status === "failed" ? "The answer failed." : "The answer is complete.");
  }
  refresh();
}

const newAnswer = (settings) => ({
  id: randomId(),
  role: "assistant",
  text: "",
  status: "starting",
  key: randomId(),
  stream: null,
  cursor: BEGINNING,
  model: models.chosen,
  settings: settings ?? {}, // as they were when the answer was asked for: its request may be sent again
  revision: 0,
});

function prompted(text, attached = []) {
  return { id: randomId(), role: "user", text, images: attached, status: "done", revision: 0 };
}

function send(text, attached = []) {
  if (!gateway || running().length > 0) return false;
  const title = (text || attached[0].name).slice(0, TITLE_CHARS);
  const conversation = current ? store.conversation(current) : store.newConversation(title, newSettings);
  const last = tree.path(conversation).at(-1) ?? null;
  store.add(conversation.id, last, [prompted(text, attached), newAnswer(conversation.settings)]);
  showNew(conversation.id);
  return true;
}

/** Adds a text to the answer that runs. */
function add(text) {
  const answer = running().at(-1);
  if (!answer || answer.isStopping) return false;
  answer.add(text);
  follow();
  return true;
}

/** Sends an input that an answer did not take as a message of its own, after that answer. */
function sendAfter(id, inputId) {
  const message = store.message(id);
  const input = message.inputs?.find((each) => each.id === inputId);
  if (!input || !send(input.text)) return;
  message.inputs = message.inputs.filter((each) => each !== input);
  message.revision += 1;
  store.save(message);
  views.get(id)?.update(message);
}

function showNew(id) {
  follow();
  if (id === current) showMessages(store.conversation(current));
  else show(id);
  refresh();
  scrollOn();
}

/** An edited prompt starts a branch of its own; the branch before stays. */
function edit(id, text) {
  if (!gateway || running().length > 0) return;
  const conversation = store.conversation(current);
  const question = prompted(text, store.message(id).images);
  store.add(current, tree.parent(conversation, id), [question, newAnswer(conversation.settings)]);
  showNew(current);
}

function regenerate(id) {
  if (!gateway || running().length > 0) return;
  const conversation = store.conversation(current);
  store.add(current, tree.parent(conversation, id), [newAnswer(conversation.settings)]);
  showNew(current);
}

function choose(id) {
  store.change(current, (conversation) => tree.choose(conversation, id));
  views.clear();
  $("log").replaceChildren();
  showMessages(store.conversation(current));
  refresh();
  views.get(id).node.scrollIntoView({ block: "nearest" });
  views.get(id).pager.querySelector("button:enabled")?.focus();
}

/** Follows the stream again if only the connection was lost; after any other failure, sends a new request. */
function retry(id) {
  const conversation = store.conversation(current);
  const message = store.message(id);
  if (message.stream && message.error.code === "connection_lost") {
    Object.assign(message, { status: "running", error: null, revision: message.revision + 1 });
    store.save(message);
    resume(conversation, message);
  } else store.replace(current, id, newAnswer(conversation.settings));
  showMessages(store.conversation(current));
  refresh();
  scrollOn();
}

function stop() {
  for (const answer of running()) answer.stop().catch(tell);
}

// Conversations

function onGone(id) {
  show(id === current ? null : current);
}

/** Stops the answers of conversations that cannot be restored any more. */
function stopErased(messages) {
  for (const message of messages) {
    if (isRunning(message) && message.stream && gateway) gateway.cancel(message.stream).catch(tell);
  }
}

function saveSettings(settings) {
  if (current) store.change(current, (conversation) => Object.assign(conversation, { settings }));
  else newSettings = settings;
  showTitle();
  $("prompt").focus();
}

$("open-settings").addEventListener("click", () => settingsDialog.open(current ? store.conversation(current).settings : newSettings));

$("new").addEventListener("click", () => {
  show(null);
  sidebar.open(false);
  $("prompt").focus();
});

for (const idea of document.querySelectorAll(".ideas button")) {
  idea.addEventListener("click", () => send(idea.textContent));
}

addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open]")) return;
  if (sidebar.isOpen) sidebar.open(false);
  else stop();
});

themeButton($("theme"));

const saveAll = () => answers.forEach((answer) => answer.save());
addEventListener("pagehide", saveAll);
document.addEventListener("visibilitychange", saveAll); // some phones never fire pagehide

const started = start();
takeOver();
await started;
