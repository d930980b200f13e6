// The chat page: wires the session, the store, the client and the views.

import { Answer } from "./answer.js";
import { BEGINNING, StreamGateway, randomId } from "./client.js";
import { $, icon, remember, themeButton } from "./dom.js";
import { Session, errorOf } from "./session.js";
import { Store, isRunning } from "./store.js";
import { MessageView } from "./view.js";

const TITLE_CHARS = 48;
const NEAR_END_PX = 80; // distance from the end within which the view follows the text

const session = new Session();
const store = new Store(onOtherTab, () => announce("This browser's storage is full: the conversation will not survive a reload."));
const answers = new Map(); // running answers by message id
const views = new Map(); // views of the shown conversation by message id
let gateway = null;
let current = null; // id of the conversation shown
let follows = true; // the view follows the text
let connection = "idle";

// Session

async function start() {
  try {
    await session.getToken();
  } catch (error) {
    // Without a network the page shows stored conversations, and the client keeps trying.
    if (!error.retriable) {
      askForKey(error.code === "not_signed_in" ? "" : error.message);
      return;
    }
  }
  $("gate").hidden = true;
  $("app").hidden = false;
  gateway = new StreamGateway({ url: location.origin, getToken: (request) => session.getToken(request), onState });
  gateway.connect();
  await loadModels();
  listConversations();
  show(sessionStorage.getItem("sgw.current") ?? localStorage.getItem("sgw.last"));
  $("prompt").focus();
}

function askForKey(message) {
  stopEverything();
  $("app").hidden = true;
  $("gate").hidden = false;
  $("sign-in-error").textContent = message;
  $("key").focus();
}

function stopEverything() {
  gateway?.close();
  gateway = null;
}

$("sign-in").addEventListener("submit", async (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  const button = event.submitter ?? $("sign-in").querySelector("button");
  if (!key) return;
  button.disabled = true;
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

async function loadModels() {
  let models = JSON.parse(localStorage.getItem("sgw.models") ?? "[]");
  try {
    const response = await fetch("/v1/models", { headers: { authorization: `Bearer ${await session.getToken()}` } });
    if (!response.ok) throw await errorOf(response);
    models = (await response.json()).data.map(({ id }) => id);
    remember("sgw.models", JSON.stringify(models));
  } catch (error) {
    announce(`The list of models could not be loaded: ${error.message}`); // until then the last known list is shown
  }
  $("model").replaceChildren(...models.map((id) => new Option(id, id)));
  const chosen = localStorage.getItem("sgw.model");
  if (models.includes(chosen)) $("model").value = chosen;
  showSimulated();
}

$("model").addEventListener("change", () => {
  remember("sgw.model", $("model").value);
  showSimulated();
});

// The connection indicator

const STATES = {
  idle: "Connecting",
  connecting: "Connecting",
  connected: "Connected",
  reconnecting: "Reconnecting",
  resuming: "Resuming",
  offline: "Offline",
  closed: "Disconnected",
};

function onState(state, { error }) {
  connection = state;
  showConnection();
  if (state === "closed" && ["not_signed_in", "invalid_api_key", "forbidden"].includes(error?.code)) askForKey(error.message);
}

function showConnection() {
  const resuming = connection !== "offline" && [...answers.values()].some((answer) => answer.isResuming);
  const shown = resuming ? "resuming" : connection;
  const node = $("connection");
  if (node.dataset.state === shown) return;
  node.dataset.state = shown;
  node.lastElementChild.textContent = STATES[shown];
}

function showSimulated() {
  const last = [...views.values()].map((view) => view.message).findLast(({ role }) => role === "assistant");
  const names = last ? [last.model, last.fingerprint] : [$("model").value];
  $("simulated").hidden = !names.some((name) => /\bsim|sim\b|simulat/i.test(name ?? ""));
}

function announce(text) {
  $("announce").textContent = text;
}

// Conversations

function listConversations() {
  const items = store.list().map(({ id, title }) => {
    const open = document.createElement("button");
    open.type = "button";
    open.className = "row";
    open.textContent = title;
    open.dir = "auto";
    if (id === current) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => {
      show(id);
      openSidebar(false);
    });
    const remove = document.createElement("button");
    remove.type = "button";
    remove.className = "icon remove";
    remove.setAttribute("aria-label", `Delete “${title}”`);
    remove.append(icon("trash"));
    remove.addEventListener("click", () => {
      for (const messageId of store.conversation(id)?.messages ?? []) answers.get(messageId)?.stream?.cancel().catch(tell);
      store.remove(id);
      show(id === current ? null : current);
    });
    const item = document.createElement("li");
    item.append(open, remove);
    return item;
  });
  $("conversations").replaceChildren(...items);
}

/** Shows a conversation, and follows its running answers. */
function show(id) {
  const conversation = id ? store.conversation(id) : null;
  if (conversation?.id !== current) follows = true;
  current = conversation?.id ?? null;
  if (current) {
    sessionStorage.setItem("sgw.current", current);
    remember("sgw.last", current);
  } else sessionStorage.removeItem("sgw.current");
  document.title = conversation ? `${conversation.title} · stream-gw` : "stream-gw";
  views.clear();
  $("log").replaceChildren();
  if (conversation) showMessages(conversation);
  $("empty").hidden = Boolean(conversation);
  listConversations();
  refresh();
  scrollOn();
}

/** Updates the views from the store. */
function showMessages(conversation) {
  const messages = store.messages(conversation);
  const ids = new Set(conversation.messages);
  for (const [id, view] of views) {
    if (ids.has(id)) continue;
    view.node.remove();
    views.delete(id);
  }
  for (const stored of messages) {
    const message = answers.get(stored.id)?.message ?? stored;
    if (!views.has(message.id)) {
      const view = new MessageView(message, () => retry(message.id));
      views.set(message.id, view);
      $("log").append(view.node);
    } else views.get(message.id).update(message);
    if (isRunning(message) && !answers.has(message.id)) resume(conversation, message);
  }
}

function bodyOf(conversation, answer) {
  const before = store.messages(conversation).slice(0, conversation.messages.indexOf(answer.id));
  const messages = before
    .filter(({ role, text, status }) => text && (role === "user" || status !== "failed"))
    .map(({ role, text }) => ({ role, content: text }));
  return { model: answer.model, messages, stream: true, stream_options: { include_usage: true }, session_id: conversation.id };
}

/** Follows a running answer. Without a stream yet, its request is sent again with the same idempotency key. */
function resume(conversation, message) {
  if (!gateway) return;
  const answer = new Answer({ gateway, store, message, body: bodyOf(conversation, message), onChange: onAnswer });
  answers.set(message.id, answer);
}

function onAnswer(answer) {
  const { message } = answer;
  const view = views.get(message.id);
  if (view) view.isStopping = answer.isStopping && !answer.isOver;
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

function refresh() {
  const runs = running().length > 0;
  $("stop").hidden = !runs;
  $("stop").disabled = running().every((answer) => answer.isStopping);
  $("send").hidden = runs;
  $("send").disabled = !$("prompt").value.trim();
  showConnection();
  showSimulated();
}

const running = () => [...answers.values()].filter((answer) => views.has(answer.message.id));

function onOtherTab({ message: messageId }) {
  if (!gateway) return;
  listConversations();
  if (!current) return;
  const conversation = store.conversation(current);
  if (!conversation) {
    show(null);
    return;
  }
  // This tab reads its answers itself; only a stream that the other tab has just created is new to it.
  const message = messageId ? store.message(messageId) : null;
  if (message && answers.has(messageId)) return;
  if (message?.status === "starting") return; // the tab that sent the request will announce the stream's id
  showMessages({ ...conversation, messages: conversation.messages.filter((id) => store.message(id)?.status !== "starting" || answers.has(id)) });
  scrollOn();
  refresh();
}

// Sending a prompt

function send(text) {
  if (!gateway || running().length > 0) return;
  const conversation = current ? store.conversation(current) : store.newConversation(text.slice(0, TITLE_CHARS));
  const question = { id: randomId(), role: "user", text, status: "done", revision: 0 };
  store.add(conversation.id, [question, newAnswer()]);
  follows = true;
  if (conversation.id === current) showMessages(store.conversation(current));
  else show(conversation.id);
  refresh();
  scrollOn();
}

const newAnswer = () => ({
  id: randomId(),
  role: "assistant",
  text: "",
  status: "starting",
  key: randomId(),
  stream: null,
  cursor: BEGINNING,
  model: $("model").value,
  revision: 0,
});

/** Follows the stream again if only the connection was lost; after any other failure, sends a new request. */
function retry(messageId) {
  const conversation = store.conversation(current);
  const message = store.message(messageId);
  if (message.stream && message.error.code === "connection_lost") {
    Object.assign(message, { status: "running", error: null, revision: message.revision + 1 });
    store.save(message);
    resume(conversation, message);
  } else store.add(current, [newAnswer()], messageId);
  showMessages(store.conversation(current));
  refresh();
  scrollOn();
}

function tell(error) {
  announce(error.message);
}

function stop() {
  for (const answer of running()) answer.stop().catch(tell);
}

// Input

const prompt = $("prompt");

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
  $("send").disabled = !prompt.value.trim();
}

prompt.addEventListener("input", fitPrompt);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || running().length > 0) return;
  prompt.value = "";
  fitPrompt();
  send(text);
});

$("stop").addEventListener("click", () => {
  stop();
  prompt.focus();
});

addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (document.body.classList.contains("sidebar-open")) openSidebar(false);
  else stop();
});

$("new").addEventListener("click", () => {
  show(null);
  openSidebar(false);
  prompt.focus();
});

for (const idea of document.querySelectorAll(".ideas button")) {
  idea.addEventListener("click", () => send(idea.textContent));
}

$("log").addEventListener("click", async ({ target }) => {
  if (!target.matches("button.copy")) return;
  const code = target.closest("figure").querySelector("pre").textContent;
  // The browser may refuse clipboard access, and plain HTTP has none: the button then says so.
  const copied = await navigator.clipboard?.writeText(code).then(
    () => true,
    () => false,
  );
  target.textContent = copied ? "Copied" : "Not allowed";
  setTimeout(() => (target.textContent = "Copy"), 1600);
});

// Scrolling: the view follows the text until the reader scrolls up

const scroller = $("scroller");

const isNearEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END_PX;

function scrollOn() {
  if (follows) scroller.scrollTop = scroller.scrollHeight;
  $("latest").hidden = follows || isNearEnd();
}

let scrolledTo = 0;
scroller.addEventListener("scroll", () => {
  // Only the reader scrolls upwards: growing text moves the end, never the position.
  if (scroller.scrollTop < scrolledTo - 1) follows = isNearEnd();
  else if (isNearEnd()) follows = true;
  scrolledTo = scroller.scrollTop;
  $("latest").hidden = follows || isNearEnd();
});

$("latest").addEventListener("click", () => {
  follows = true;
  scrollOn();
  prompt.focus();
});

// Sidebar

function openSidebar(open) {
  document.body.classList.toggle("sidebar-open", open);
  $("menu").setAttribute("aria-expanded", String(open));
  $("scrim").hidden = !open;
  if (open) $("new").focus();
}

$("menu").addEventListener("click", () => openSidebar(!document.body.classList.contains("sidebar-open")));
$("scrim").addEventListener("click", () => openSidebar(false));

themeButton($("theme"));

const saveAll = () => answers.forEach((answer) => answer.save());
addEventListener("pagehide", saveAll);
document.addEventListener("visibilitychange", saveAll); // some phones never fire pagehide

await start();
