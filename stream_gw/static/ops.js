// The operations page: wires the session, the feed and the views. It is read-only.

import { $, el, themeButton } from "./dom.js";
import { Feed, OpsSession } from "./ops-feed.js";
import { seconds, span, troubles, whole } from "./ops-rules.js";
import { explained, moment, time } from "./ops-trace.js";
import { Attention, FirstTokens, Pools, Table, Tiles } from "./ops-view.js";

const TRACES_MS = 15_000;
const OLD_MS = 6_000; // snapshots come every 2 s
const ID = /^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}$/;

const session = new OpsSession();
const attention = new Attention($("attention"), announce);
const tiles = new Tiles($("tiles"));
const pools = new Pools($("pools"));
const first = new FirstTokens($("first"));
let feed = null;
let snapshot = null;
let receivedAt = 0;

function announce(text) {
  $("announce").textContent = text;
}

// Session

async function start() {
  const key = session.takeKey();
  try {
    if (key) await session.signIn(key);
  } catch (error) {
    askForKey(error.message);
    return;
  }
  if (!session.isSignedIn) {
    askForKey("");
    return;
  }
  $("gate").hidden = true;
  $("app").hidden = false;
  feed = new Feed(session, { onSnapshot, onState, onRefused: (error) => askForKey(error.message) });
  feed.run();
  openFromAddress();
}

function askForKey(message) {
  feed?.stop();
  feed = null;
  session.signOut();
  if ($("detail").open) $("detail").close();
  $("app").hidden = true;
  $("gate").hidden = false;
  $("sign-in-error").textContent = message;
  $("key").focus();
}

$("sign-in").addEventListener("submit", async (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  const button = $("sign-in").querySelector("button");
  if (!key) return;
  button.disabled = true;
  try {
    await session.signIn(key);
    $("key").value = "";
    await start();
  } catch (error) {
    askForKey(error.message);
  } finally {
    button.disabled = false;
  }
});

$("sign-out").addEventListener("click", () => askForKey(""));

// The feed

function onSnapshot(received) {
  const isNews = received.telemetry.state !== snapshot?.telemetry.state;
  snapshot = received;
  receivedAt = performance.now();
  document.body.classList.toggle("old-fleet", received.fabric.state === "away");
  attention.show(troubles(received));
  tiles.show(received);
  pools.show(received.fleet);
  first.show(received);
  showAge();
  if (isNews) load();
}

const STATES = { connecting: "Connecting", connected: "Live", reconnecting: "Reconnecting" };

function onState(state, error) {
  const node = $("feed");
  if (error && state === "reconnecting" && error.code === "too_many") node.title = error.message;
  else node.title = "";
  if (node.dataset.state !== state) {
    node.dataset.state = state;
    node.lastElementChild.textContent = STATES[state];
  }
  if (error?.code === "too_many" && !snapshot) attention.show([{ level: "bad", key: "too_many", text: error.message }]);
  showAge();
}

function showAge() {
  if (!snapshot) return;
  const age = performance.now() - receivedAt;
  const isOld = age > OLD_MS;
  document.body.classList.toggle("old", isOld);
  const at = new Date(snapshot.at_ms).toISOString().slice(11, 19);
  $("age").textContent = isOld ? `These figures are ${seconds(age / 1000)} old` : `${at} UTC · ${snapshot.gateway.name}`;
}

setInterval(showAge, 1000);

// Requests

const CHOICES = [
  ["Recent", "/traces?since=15m&top=50", "in the last 15 minutes"],
  ["Slowest", "/traces/slow?since=15m&top=50", "in the last 15 minutes"],
  ["Late first token", "/traces/slow?phase=ttft&since=15m&top=50", "in the last 15 minutes"],
  ["Failed", "/traces?ended=failed&since=1h&top=50", "failed in the last hour"],
  ["Refused", "/traces?ended=refused&since=1h&top=50", "were refused in the last hour"],
];
let choice = CHOICES[0];
let loading = null;

const idOf = (row) => row.stream || row.id;

const requests = new Table(
  "Requests",
  [
    { title: "Ended (UTC)", name: "name", of: (row) => ({ text: time(row.at_us), title: `${moment(row.at_us)}\n${idOf(row)}` }) },
    { title: "End", name: "", of: (row) => ({ text: row.ended, sub: row.error_code ?? "", tone: ["failed", "refused"].includes(row.ended) ? "bad" : "" }) },
    { title: "Tenant", name: "far", of: (row) => row.tenant },
    { title: "Model", name: "", of: (row) => row.model || "–" },
    { title: "Replica", name: "far", of: (row) => row.replica || "–" },
    { title: "Tokens in, out", name: "number far", of: (row) => `${whole(row.prompt_tokens)}, ${whole(row.output_tokens)}` },
    { title: "First token", name: "number", of: (row) => (row.ttft_us ? span(row.ttft_us / 1000) : "–") },
    { title: "Total", name: "number", of: (row) => span(row.wall_us / 1000) },
  ],
  { onRow: (row, button) => openDetail(idOf(row), button) },
);
requests.node.hidden = true;
$("requests").append(requests.node);

const EVENTS = "/traces/queries/fleet?since=1h&top=20";
const events = new Table("What happened in the last hour", [
  { title: "When (UTC)", name: "name", of: (row) => ({ text: time(row.at_us), title: moment(row.at_us) }) },
  { title: "What", name: "", of: (row) => [row.what, row.state].filter(Boolean).join(": ") },
  { title: "Pool", name: "far", of: (row) => row.pool || "–" },
  { title: "Replica", name: "", of: (row) => row.replica || "–" },
  { title: "Why", name: "", of: (row) => row.reason || "–" },
  { title: "Source", name: "far", of: (row) => row.source },
]);
events.node.hidden = true;
$("events").append(events.node);

for (const each of CHOICES) {
  const button = el("button", "", each[0]);
  button.type = "button";
  button.addEventListener("click", () => {
    choice = each;
    showChoice();
    if (snapshot) load();
  });
  document.querySelector(".choices").append(button);
}

function showChoice() {
  [...document.querySelectorAll(".choices button")].forEach((button, index) => button.setAttribute("aria-pressed", String(CHOICES[index] === choice)));
}
showChoice();

/** Loads the lists of requests and events from telemetry. */
async function load() {
  loading?.abort();
  loading = new AbortController();
  const { signal } = loading;
  const { state } = snapshot.telemetry;
  if (state !== "ok") {
    const said = state === "off" ? "This gateway has no telemetry configured (STREAM_GW_TELEMETRY_URL)." : "Telemetry does not answer.";
    note("requests", requests.node.hidden ? said : "Telemetry does not answer: this list is old.");
    note("events", events.node.hidden ? said : "Telemetry does not answer: this list is old.");
    return;
  }
  const [, path, when] = choice;
  await Promise.all([
    ask("requests", requests, path, signal, (row) => `${idOf(row)} ${row.at_us}`, `No requests ${when}, according to telemetry.`),
    ask("events", events, EVENTS, signal, (row) => `${row.at_us} ${row.what} ${row.replica} ${row.source}`, "No events, according to telemetry."),
  ]);
}

async function ask(name, table, path, signal, keyOf, none) {
  try {
    const rows = await session.get(path, signal);
    if (signal.aborted) return;
    table.node.hidden = !rows.length;
    table.update(rows.map((row) => [keyOf(row), row]));
    note(name, rows.length ? "" : none);
  } catch (error) {
    if (signal.aborted || error.name === "AbortError") return;
    if (error.code === "not_signed_in" || error.code === "invalid_api_key") askForKey(error.message);
    else if (error.code !== "too_many") note(name, error.code ? error.message : "The gateway cannot be reached.");
  }
}

function note(name, text) {
  const node = $(`${name}-note`);
  if (node.textContent !== text) node.textContent = text;
}

setInterval(() => {
  if (feed && snapshot && document.visibilityState === "visible" && !$("detail").open) load();
}, TRACES_MS);

$("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = $("id").value.trim();
  if (!id) return;
  if (ID.test(id)) openDetail(id, $("id"));
  else note("find", "An id may contain letters, digits and the characters _ . : - only.");
});

$("id").addEventListener("input", () => note("find", ""));

// One request

let asking = null;

async function openDetail(id, opener) {
  asking?.abort();
  asking = new AbortController();
  const { signal } = asking;
  $("detail-title").textContent = id;
  $("detail-body").replaceChildren(el("p", "line", "Loading from telemetry …"));
  $("detail-body").setAttribute("aria-busy", "true");
  history.replaceState(null, "", `#trace=${encodeURIComponent(id)}`);
  if (!$("detail").open) {
    $("detail").showModal();
    $("detail").opener = opener;
  }
  $("detail").scrollTop = 0;
  let shown;
  try {
    shown = explained(await session.get(`/traces/${encodeURIComponent(id)}/why`, signal));
  } catch (error) {
    if (signal.aborted) return;
    shown = [el("p", "line bad", error.code ? error.message : "The gateway cannot be reached.")];
  }
  if (signal.aborted) return;
  $("detail-body").removeAttribute("aria-busy");
  $("detail-body").replaceChildren(...shown);
}

$("detail").addEventListener("close", () => {
  asking?.abort();
  history.replaceState(null, "", location.pathname);
  // The browser has given the focus back already; somebody may have moved it since
  if (document.activeElement === document.body) $("detail").opener?.focus();
  $("detail").opener = null;
  if (feed && snapshot) load();
});
$("detail-close").addEventListener("click", () => $("detail").close());
$("detail").addEventListener("click", (event) => {
  if (event.target === $("detail")) $("detail").close(); // a click outside the dialog
});

/** Opens the request that the page's address names. */
function openFromAddress() {
  const id = new URLSearchParams(location.hash.slice(1)).get("trace");
  if (id && ID.test(id)) openDetail(id, null);
}

addEventListener("hashchange", () => {
  const fragment = new URLSearchParams(location.hash.slice(1));
  if (fragment.has("key")) location.reload();
  else if (feed) openFromAddress();
});

themeButton($("theme"));
await start();
