// The operations page: wires the session, the feed and the views. It is read-only.

import { backoffMs } from "./client.js";
import { $, el, themeButton } from "./dom.js";
import { Feed, OpsSession } from "./ops-feed.js";
import { exportButtons } from "./ops-export.js";
import { Filters } from "./ops-filters.js";
import { Latency } from "./ops-latency.js";
import { Events, idOf, Requests } from "./ops-requests.js";
import { seconds, troubles } from "./ops-rules.js";
import { Samples } from "./ops-spark.js";
import { parse, rangeText, serialize, windowOf } from "./ops-state.js";
import { idNode } from "./ops-table.js";
import { bothOfRange, times } from "./ops-time.js";
import { explained } from "./ops-trace.js";
import { Attention, Pools, Tiles } from "./ops-view.js";

const TRACES_MS = 15_000;
const LONG_MS = 60_000; // interval for ranges of an hour and more
const OLD_MS = 6_000; // snapshots come every 2 s
const ID = /^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}$/;

const session = new OpsSession();
const attention = new Attention($("attention"), announce);
const tiles = new Tiles($("tiles"));
const pools = new Pools($("pools"));
const samples = new Samples();
let state = parse(location.search);
let feed = null;
let snapshot = null;
let receivedAt = 0;

function announce(text) {
  $("announce").textContent = text;
}

// Session

let signingIn = null; // the timer of the next try

function start() {
  const key = session.keyInAddress();
  if (key) {
    $("key").value = key;
    signIn(key);
  } else if (session.isSignedIn) open();
  else askForKey("");
}

/** Signs in. While the gateway cannot answer, tries again until somebody changes the key. */
async function signIn(key, tries = 0) {
  clearTimeout(signingIn);
  const button = $("sign-in").querySelector("button");
  button.disabled = true;
  try {
    await session.signIn(key);
  } catch (error) {
    askForKey(error.retriable ? `${error.message} Trying again …` : error.message);
    const pauseMs = Math.max((error.retryAfterS ?? 0) * 1000, backoffMs(tries));
    if (error.retriable) signingIn = setTimeout(() => signIn(key, tries + 1), pauseMs);
    else session.forgetAddress();
    return;
  } finally {
    button.disabled = false;
  }
  $("key").value = "";
  session.forgetAddress();
  open();
}

function open() {
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

$("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  if (key) signIn(key);
});

$("key").addEventListener("input", () => clearTimeout(signingIn));

$("sign-out").addEventListener("click", () => askForKey(""));

// The feed

function onSnapshot(received) {
  const isNews = received.telemetry.state !== snapshot?.telemetry.state;
  snapshot = received;
  receivedAt = performance.now();
  document.body.classList.toggle("old-fleet", received.fabric.state === "away");
  samples.add(received);
  attention.show(troubles(received));
  filters.know(received.telemetry);
  showSnapshot();
  showAge();
  if (isNews) load();
}

/** Shows the last snapshot in the light of the state. */
function showSnapshot() {
  if (!snapshot) return;
  const shown = shownState();
  latency.receive(snapshot, shown);
  const { total, range } = latency;
  const text = `${shown.tenant || "fleet"}, ${shown.range === "custom" ? "this range" : rangeText(shown, bothOfRange)}${shown.model || shown.status ? ", filtered" : ""}`;
  tiles.show(snapshot, total && { total, text, rangeS: range.untilS - range.fromS });
  pools.show(snapshot.fleet, shown.model, { samples, figure: shown.spark, at: snapshot.at_ms });
  $("latency-range").textContent = rangeText(shown, bothOfRange);
  $("events-range").textContent = shown.range === "live" ? "last 1 h" : rangeText(shown, bothOfRange);
}

const STATES = { connecting: "Connecting", connected: "Live", reconnecting: "Reconnecting" };

const TOLD = ["too_many", "silent"]; // codes of errors that the operator can do something about

function onState(state, error) {
  const node = $("feed");
  const isTold = TOLD.includes(error?.code);
  node.title = isTold && state === "reconnecting" ? error.message : "";
  if (node.dataset.state !== state) {
    node.dataset.state = state;
    node.lastElementChild.textContent = STATES[state];
  }
  if (isTold && !snapshot) attention.show([{ level: "bad", key: error.code, text: error.message }]);
  showAge();
}

function showAge() {
  if (!snapshot) return;
  const age = performance.now() - receivedAt;
  const isOld = age > OLD_MS;
  document.body.classList.toggle("old", isOld);
  const { utc, local } = times(snapshot.at_ms);
  const clock = [`${utc} UTC`, local, snapshot.gateway.name].filter(Boolean).join(" · ");
  $("age").textContent = isOld ? `These figures are ${seconds(age / 1000)} old` : clock;
}

setInterval(showAge, 1000);

// What is shown

const parts = { session, about: exportAbout, announce };
const latency = new Latency($("latency"), { ...parts, onStep: openStep, onAxis: () => change({ axis: state.axis === "full" ? "fit" : "full" }) });
const requests = new Requests($("requests"), $("requests-note"), $("requests-tools"), {
  ...parts, onRow: (row, button) => openDetail(idOf(row), button), onMore: () => load(),
});
const events = new Events($("events"), $("events-note"), $("events-tools"), parts);
$("pools-tools").append(exportButtons("replicas", replicaRows, exportAbout, announce));
const filters = new Filters({ onChange: change, announce });
let loading = null;
let loadedAt = 0;
filters.show(state);

/** Fields beside the rows of an export in JSON. */
function exportAbout() {
  return { exported_at: new Date().toISOString(), gateway: snapshot?.gateway.name ?? "", page: `${location.origin}${location.pathname}${location.search}`, ...(shownState().range === "live" ? {} : windowOf(state)) };
}

function replicaRows() {
  const shown = (snapshot?.fleet?.pools ?? []).filter((pool) => !state.model || pool.replicas.some(({ models }) => models.includes(state.model)));
  return shown.flatMap((pool) => pool.replicas.map(({ recent, ...row }) => ({ at_utc: new Date(snapshot.at_ms).toISOString(), pool: pool.pool, ...row })));
}

/** The state that can be shown: without telemetry only the live range, and no filter on requests. */
function shownState() {
  return snapshot?.telemetry.state === "off" ? { ...state, range: "live", tenant: "", status: "" } : state;
}

function change(changes) {
  state = { ...state, ...changes };
  history.pushState(null, "", location.pathname + serialize(state) + location.hash);
  apply(Object.keys(changes));
}

/** Shows the state; what is loaded for another range or filter is dropped. */
function apply(changed) {
  filters.show(state);
  const isOnlyView = changed.every((name) => ["spark", "axis"].includes(name));
  if (!isOnlyView) {
    const isOnlySort = changed.every((name) => name === "sort");
    if (!isOnlySort) latency.forget();
    if (!isOnlySort) events.forget();
    requests.forget();
    requests.say("Loading from telemetry …");
  }
  showSnapshot();
  if (snapshot && !isOnlyView) load({ isNew: true });
}

addEventListener("popstate", () => {
  const next = parse(location.search);
  const changed = Object.keys(next).filter((name) => next[name] !== state[name]);
  state = next;
  if (changed.length) apply(changed);
});

/** Shows the requests of one step of a chart, the latest first tokens first. */
function openStep(row, stepS) {
  change({ range: "custom", from: row.at, to: row.at + stepS * 1000, sort: "ttft" });
  $("requests-title").scrollIntoView({ block: "start" });
  $("requests-title").focus({ preventScroll: true });
}

/** Loads what telemetry has of the range: charts, requests and events. */
async function load({ isNew = false } = {}) {
  loading?.abort();
  loading = new AbortController();
  loadedAt = performance.now();
  const { signal } = loading;
  const shown = shownState();
  if (snapshot.telemetry.state !== "ok") {
    const said = snapshot.telemetry.state === "off" ? "This gateway has no telemetry configured (STREAM_GW_TELEMETRY_URL)." : "Telemetry does not answer.";
    requests.fail(said);
    events.fail(said);
    return;
  }
  await Promise.all([ask(latency, shown, signal), ask(requests, shown, signal), ask(events, shown, signal)]);
  if (signal.aborted) return;
  showSnapshot();
  if (isNew || !filters.coverage?.requests) await learn(shown, signal);
}

async function ask(part, shown, signal) {
  try {
    await part.load(shown, signal);
  } catch (error) {
    if (signal.aborted || error.name === "AbortError") return;
    if (error.code === "not_signed_in" || error.code === "invalid_api_key") askForKey(error.message);
    else if (error.code !== "too_many") part.fail(error.code ? error.message : "The gateway cannot be reached.", shown);
  }
}

/** What telemetry can serve, and what can be filtered by. The page does without it. */
async function learn(shown, signal) {
  const known = { async load() {
    const [[coverage], rows] = await Promise.all([
      session.get("/traces/queries/coverage", signal),
      session.get(`/traces/queries/filters?${new URLSearchParams(windowOf(shown))}`, signal),
    ]);
    filters.know(snapshot.telemetry, coverage);
    filters.propose(rows, liveModels());
  }, fail() {} };
  await ask(known, shown, signal);
}

const liveModels = () => (snapshot?.fleet?.pools ?? []).flatMap((pool) => pool.replicas.flatMap(({ models }) => models));

setInterval(() => {
  if (!feed || !snapshot || document.visibilityState !== "visible" || $("detail").open) return;
  const every = { live: TRACES_MS, "15m": TRACES_MS, custom: Infinity }[shownState().range] ?? LONG_MS;
  if (performance.now() - loadedAt >= every - 100) load();
}, TRACES_MS);

$("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = $("id").value.trim();
  if (!id) return;
  if (ID.test(id)) openDetail(id, $("id"));
  else noteFind("An id may contain letters, digits and the characters _ . : - only.");
});

$("id").addEventListener("input", () => noteFind(""));

function noteFind(text) {
  $("find-note").textContent = text;
}

// One request

let asking = null;

async function openDetail(id, opener) {
  asking?.abort();
  asking = new AbortController();
  const { signal } = asking;
  $("detail-title").replaceChildren(idNode(id, { most: 40 }));
  $("detail-body").replaceChildren(el("p", "line", "Loading from telemetry …"));
  $("detail-body").setAttribute("aria-busy", "true");
  history.replaceState(null, "", `${location.pathname}${location.search}#trace=${encodeURIComponent(id)}`);
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
  history.replaceState(null, "", location.pathname + location.search);
  // The browser has given the focus back already; somebody may have moved it since
  if (document.activeElement === document.body) $("detail").opener?.focus();
  $("detail").opener = null;
  if (feed && snapshot && shownState().range !== "custom") load();
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
start();
