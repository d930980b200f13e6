// The view of a snapshot. Only changed cells are written, so that scrolling, focus and selection stay.

import { el, icon } from "./dom.js";
import { count, figure, lastMinute, longest, minutes, percent, replicas, seconds, span, waiting, whole } from "./ops-rules.js";

const MODELS_SHOWN = 3;
const LONG_CHARS = 18;
const LONG_WAIT_S = 5;

/** Shows `{text, sub, share, tone, title}` in a cell. */
function fill(cell, shown) {
  const content = typeof shown === "string" ? { text: shown } : shown;
  const seen = JSON.stringify(content);
  if (cell.seen === seen) return;
  cell.seen = seen;
  cell.dataset.tone = content.tone ?? "";
  cell.title = content.title ?? (content.text.length > LONG_CHARS ? content.text : ""); // the full text, which the cell may cut off
  const parts = [el("bdi", "value", content.text)];
  if (content.sub) parts.push(el("bdi", "sub", content.sub));
  if (content.share !== undefined) {
    const meter = el("span", "meter", el("i"));
    meter.firstChild.style.width = `${Math.min(Math.max(content.share, 0), 1) * 100}%`;
    parts.push(meter);
  }
  cell.replaceChildren(...parts);
}

/** A table that reuses its rows by key. A column is `{title, name, of(row)}`; cells of the first one are headers. */
export class Table {
  constructor(caption, columns, { onRow = null } = {}) {
    this.columns = columns;
    this.onRow = onRow;
    this.rows = new Map();
    this.body = el("tbody");
    const heads = columns.map(({ title, name, about }) => {
      const head = el("th", name, title);
      head.scope = "col";
      if (about) head.title = about;
      return head;
    });
    const table = el("table", "", el("caption", "sr", caption), el("thead", "", el("tr", "", ...heads)), this.body);
    this.node = el("div", "scroll", table);
    this.node.tabIndex = 0;
    this.node.setAttribute("role", "region");
    this.node.setAttribute("aria-label", caption);
  }

  /** `rows`: `[key, row]` in order. */
  update(rows) {
    // Remove deleted rows first: a row that is moved loses the focus
    const kept = new Set(rows.map(([key]) => key));
    for (const [key, { node }] of this.rows) {
      if (kept.has(key)) continue;
      node.remove();
      this.rows.delete(key);
    }
    let before = null;
    for (const [key, row] of rows) {
      const line = this.rows.get(key) ?? this.add(key);
      line.row = row;
      this.columns.forEach(({ of }, index) => fill(line.cells[index], of(row)));
      const place = before ? before.nextSibling : this.body.firstChild;
      if (place !== line.node) this.body.insertBefore(line.node, place);
      before = line.node;
    }
  }

  add(key) {
    const cells = this.columns.map(({ name }, index) => {
      const cell = el(index ? "td" : "th", name);
      if (!index) cell.scope = "row";
      return cell;
    });
    const line = { node: el("tr", "", ...cells), cells, row: null };
    if (this.onRow) {
      // The whole row takes clicks; keyboards and screen readers use the button
      const button = el("button", "open");
      button.type = "button";
      cells[0].replaceChildren(button);
      line.cells[0] = button;
      line.node.className = "opens";
      line.node.addEventListener("click", () => {
        if (!getSelection()?.toString()) this.onRow(line.row, button);
      });
    }
    this.rows.set(key, line);
    return line;
  }
}

// Problems

export class Attention {
  constructor(node, announce) {
    this.node = node;
    this.announce = announce;
    this.keys = null;
  }

  show(found) {
    const texts = JSON.stringify(found);
    if (texts === this.texts) return;
    this.texts = texts;
    this.node.className = found[0]?.level ?? "well";
    if (found.length) {
      const items = found.map(({ level, text }) => {
        const item = el("li", level, icon("alert"), el("span", "sr", level === "bad" ? "Urgent: " : "Warning: "), el("bdi", "", text));
        return item;
      });
      this.node.replaceChildren(el("ul", "", ...items));
    } else this.node.replaceChildren(el("p", "", icon("well"), "Nothing needs attention."));
    // A screen reader announces new problems, not each changed figure
    const keys = new Set(found.map(({ key }) => key));
    const news = found.filter(({ key }) => !this.keys?.has(key));
    if (news.length) this.announce(news.map(({ text }) => text).join(" "));
    else if (this.keys?.size && !keys.size) this.announce("Nothing needs attention any more.");
    this.keys = keys;
  }
}

// Tiles

export class Tiles {
  constructor(node) {
    this.node = node;
    this.tiles = new Map();
  }

  show(snapshot) {
    for (const [title, content] of tiles(snapshot)) {
      let tile = this.tiles.get(title);
      if (!tile) {
        tile = el("dd");
        this.node.append(el("div", "tile", el("dt", "", title), tile));
        this.tiles.set(title, tile);
      }
      fill(tile, content);
    }
  }
}

function* tiles({ at_ms: at, fleet, here, gateway, history, telemetry }) {
  const pools = fleet?.pools ?? [];
  const sum = (of) => pools.reduce((all, pool) => all + of(pool), 0);
  const ready = sum(({ states }) => states.ready ?? 0);
  const all = sum(replicas);
  const slots = sum((pool) => pool.slots);
  const asked = sum((pool) => pool.asked);
  const waits = sum(waiting);
  const oldest = Math.max(0, ...pools.map(longest));
  const unknown = { text: "–", sub: "unknown yet" };
  yield ["Replicas ready", fleet ? { text: `${whole(ready)} of ${whole(all)}`, sub: count(pools.length, "pool"), tone: ready < all || !all ? "warn" : "" } : unknown];
  yield ["Demand", fleet ? { text: slots ? percent(asked / slots) : asked ? "all wait" : "0 %", sub: `${whole(asked)} asked of ${count(slots, "slot")}`, share: slots ? asked / slots : Number(asked > 0), tone: asked > slots ? "warn" : "" } : unknown];
  yield ["Queue", fleet ? { text: whole(waits), sub: waits ? `oldest ${seconds(oldest)}` : "empty", tone: oldest >= LONG_WAIT_S ? "warn" : "" } : unknown];
  yield ["Output tokens", fleet ? { text: `${figure(sum((pool) => pool.tokens_per_s))}/s`, sub: "all replicas" } : unknown];
  const minute = lastMinute(at) * 60_000_000;
  const last = minutes({ at_ms: at, history }).find((row) => row.minute_us === minute);
  if (history && telemetry.state === "ok") yield ["Requests", { text: `${figure((last?.requests ?? 0) / 60)}/s`, sub: `fleet, minute of ${clock(minute)}; here ${figure(here.requests_per_s)}/s` }];
  else yield ["Requests", { text: `${figure(here.requests_per_s)}/s`, sub: "this gateway, last minute" }];
  const first = here.ttft[0];
  if (last && last.ttft_p99_ms !== null) yield ["First token, p99", { text: span(last.ttft_p99_ms), sub: `fleet, minute of ${clock(minute)}; p50 ${span(last.ttft_p50_ms)}` }];
  else yield ["First token, p99", first ? { text: span(first.p99_ms), sub: `this gateway, ${seconds(here.window_s)}; p50 ${span(first.p50_ms)}` } : { text: "–", sub: "no request yet" }];
  const shed = Object.values(here.sheds).reduce((total, number) => total + number, 0);
  yield ["Rejected", { text: whole(shed), sub: `this gateway, last ${seconds(here.window_s)}`, tone: shed ? "warn" : "" }];
  const lagging = gateway.lagging ? `, ${whole(gateway.lagging)} too slow` : "";
  yield ["Open streams", { text: whole(gateway.open_streams), sub: `this gateway; ${count(gateway.open_sockets, "socket")}${lagging}` }];
}

const clock = (us) => new Date(us / 1000).toISOString().slice(11, 16);

// Pools

const STATES = { ready: "", lost: "bad", draining: "warn", new: "", starting: "warn", warming: "warn", warm: "", sleeping: "" };

const COLUMNS = [
  { title: "Replica", name: "name", of: (row) => ({ text: row.replica, sub: row.kind, title: [row.replica, row.kind].join("\n") }) },
  { title: "State", name: "state", of: (row) => (row.blocked ? { text: "takes none", sub: row.blocked, title: row.blocked, tone: "bad" } : { text: row.state, tone: STATES[row.state] ?? "warn" }) },
  {
    title: "Running", name: "number", about: "Sequences that the engine computes / its maximum",
    of: (row) => ({ text: row.slots ? `${row.running} / ${row.slots}` : "–", share: row.slots ? row.running / row.slots : 0 }),
  },
  { title: "Wait inside", name: "number", about: "Sequences that wait in the engine for a slot", of: (row) => ({ text: whole(row.waiting), tone: row.waiting ? "warn" : "" }) },
  { title: "In flight", name: "number far", about: "Streams that the replica runs or is about to receive / the number at which placement chooses another replica", of: (row) => (row.room ? `${row.in_flight} / ${row.room}` : `${row.in_flight}`) },
  { title: "Tokens/s", name: "number", of: (row) => figure(row.tokens_per_s) },
  { title: "KV cache", name: "number", of: (row) => (row.kv_used === null ? "–" : { text: percent(row.kv_used), share: row.kv_used, tone: row.kv_used >= 0.95 ? "warn" : "" }) },
  { title: "Queue p99", name: "number", about: "Time from a request's arrival at the replica to the computation of its first token, 99th percentile of the last minute", of: (row) => ({ text: span(row.queue_p99_ms), tone: row.queue_p99_ms >= 1000 ? "warn" : "" }) },
  { title: "Prefix hits", name: "number far", about: "Share of the prompt tokens that were found in the replica's cache", of: (row) => (row.prefix_hits === null ? "–" : percent(row.prefix_hits)) },
  { title: "Lease", name: "number far", about: "Time until the lease expires and the replica counts as dead", of: (row) => (row.lease_left_s < 0 ? { text: `expired ${seconds(-row.lease_left_s)} ago`, tone: "bad" } : `${row.lease_left_s.toFixed(1)} s left`) },
];

function some(names) {
  const more = names.length - MODELS_SHOWN;
  return names.slice(0, MODELS_SHOWN).join(", ") + (more > 0 ? ` and ${more} more` : "");
}

function kindOf(row) {
  if (!row.models.length && !row.engine) return "";
  const base = row.models.filter((model) => !row.adapters.includes(model));
  const adapters = row.adapters.length ? `adapters ${some(row.adapters)}` : "";
  return [some(base), adapters, row.simulated ? "simulated, no real model" : row.engine, row.hardware, row.region, row.revision && `revision ${row.revision}`].filter(Boolean).join(" · ");
}

class PoolView {
  constructor(name) {
    this.title = el("h3", "", el("bdi", "", name));
    this.facts = el("p", "facts");
    this.kind = el("p", "kind");
    this.plan = el("p", "kind");
    this.tiers = el("ul", "tiers");
    this.table = new Table(`Replicas of pool ${name}`, COLUMNS);
    this.more = el("p", "line");
    this.node = el("article", "pool", el("header", "", this.title, this.facts, this.tiers), this.plan, this.kind, this.table.node, this.more);
  }

  show(pool) {
    const all = replicas(pool);
    const states = Object.entries(pool.states).sort().map(([state, number]) => `${whole(number)} ${state}`);
    const first = pool.ttft_p99_ms === null ? "" : ` · first token p50 ${span(pool.ttft_p50_ms)}, p99 ${span(pool.ttft_p99_ms)} (last minute)`;
    text(this.facts, `${states.join(", ") || "no replica"} · ${whole(pool.asked)} asked of ${count(pool.slots, "ready slot")} · ${figure(pool.tokens_per_s)} tokens/s${first}`);
    const { plan } = pool;
    text(this.plan, plan ? `Plan: ${plan.ready} ready, ${plan.warm} warm, ${plan.pods} in all${plan.reason ? `: ${plan.reason}` : ""}${plan.at_ms ? ` (since ${new Date(plan.at_ms).toISOString().slice(11, 16)} UTC)` : ""}` : "");
    const tiers = pool.tiers.map(({ tier, waiting: waits, oldest_s: oldest }) => ({
      tone: waits ? (oldest >= LONG_WAIT_S ? "warn" : "some") : "",
      text: waits ? `${tier}: ${count(waits, "waits", "wait")}, oldest ${seconds(oldest)}` : `${tier}: empty`,
    }));
    if (!waiting(pool)) tiers.splice(0, tiers.length, { tone: "", text: "no request waits" });
    const seen = JSON.stringify(tiers);
    if (seen !== this.seen) {
      this.seen = seen;
      this.tiers.replaceChildren(...tiers.map((tier) => el("li", tier.tone, tier.text)));
    }
    // Values that all replicas share are shown above the table
    const kinds = new Set(pool.replicas.map(kindOf).filter(Boolean));
    const common = kinds.size === 1 ? [...kinds][0] : "";
    text(this.kind, common && `Serving ${common}`);
    this.table.node.hidden = !pool.replicas.length;
    this.table.update(pool.replicas.map((row) => [row.replica, { ...row, kind: common ? "" : kindOf(row) }]));
    const left = all - pool.replicas.length;
    text(this.more, left > 0 ? `${count(left, "more replica")}, ready unless the states above say otherwise, ${left === 1 ? "is" : "are"} not listed.` : "");
  }
}

function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

export class Pools {
  constructor(node) {
    this.node = node;
    this.views = new Map();
    this.note = el("p", "line");
    node.append(this.note);
  }

  show(fleet) {
    const pools = fleet?.pools ?? [];
    const left = (fleet?.pools_all ?? 0) - pools.length;
    text(this.note, !fleet ? "No data of the fleet yet." : !pools.length ? "There is no pool: no replica has joined, and no request waits." : left > 0 ? `${count(left, "more pool")} ${left === 1 ? "is" : "are"} not shown.` : "");
    const names = new Set(pools.map(({ pool }) => pool));
    for (const [name, view] of this.views) {
      if (names.has(name)) continue;
      view.node.remove();
      this.views.delete(name);
    }
    let before = this.note;
    for (const pool of pools) {
      const view = this.views.get(pool.pool) ?? new PoolView(pool.pool);
      this.views.set(pool.pool, view);
      view.show(pool);
      if (before.nextSibling !== view.node) before.after(view.node);
      before = view.node;
    }
  }
}

// Time to the first token

const QUANTILES = [
  { title: "p50", name: "number", of: (row) => spanOf(row.p50_ms) },
  { title: "p95", name: "number", of: (row) => spanOf(row.p95_ms) },
  { title: "p99", name: "number", of: (row) => spanOf(row.p99_ms) },
];
const spanOf = (ms) => (ms === null ? "–" : span(ms));
const MINUTES_SHOWN = 15;

export class FirstTokens {
  constructor(node) {
    const number = { title: "Requests", name: "number", of: (row) => whole(row.count) };
    const name = { title: "Pool", name: "name", of: (row) => row.pool || "all pools" };
    this.here = new Table("Time to the first token at this gateway, by pool", [name, number, ...QUANTILES]);
    const ends = { title: "Failed, refused", name: "number", of: (row) => ({ text: `${whole(row.failed)}, ${whole(row.refused)}`, tone: row.failed ? "warn" : "" }) };
    const no = { ...name, of: (row) => row.pool || "no pool" };
    this.fleet = new Table("Time to the first token in the whole fleet, by pool", [no, number, ...QUANTILES, ends]);
    this.hereTitle = el("h3");
    this.hereNote = el("p", "line");
    this.fleetNote = el("p", "line");
    this.chart = el("div", "chart");
    node.append(
      el("article", "half", el("h3", "", `The whole fleet, last ${MINUTES_SHOWN} minutes`), this.fleetNote, this.chart, this.fleet.node),
      el("article", "half", this.hereTitle, this.hereNote, this.here.node),
    );
  }

  show({ at_ms: at, here, gateway, history, telemetry }) {
    text(this.hereTitle, `This gateway, last ${seconds(here.window_s)}`);
    text(this.hereNote, here.ttft.length ? gateway.name : `${gateway.name}: no first token yet.`);
    this.here.node.hidden = !here.ttft.length;
    this.here.update(here.ttft.map((row) => [row.pool, row]));
    const old = telemetry.age_s > 30 ? `These figures are ${seconds(telemetry.age_s)} old.` : "";
    const notes = {
      off: "This gateway has no telemetry configured (STREAM_GW_TELEMETRY_URL), so there is no history and there are no traces.",
      away: history ? old : "Telemetry does not answer.",
      ok: history ? (history.length ? "From telemetry, some seconds late." : "Telemetry has no request in that time.") : "Loading from telemetry …",
    };
    text(this.fleetNote, notes[telemetry.state]);
    const pools = (history ?? []).filter((row) => !row.minute_us);
    this.fleet.node.hidden = !pools.length;
    this.fleet.update(pools.map((row) => [row.pool, { ...row, count: row.requests, p50_ms: row.ttft_p50_ms, p95_ms: row.ttft_p95_ms, p99_ms: row.ttft_p99_ms }]));
    const seen = JSON.stringify([history, lastMinute(at)]);
    if (seen === this.seen) return;
    this.seen = seen;
    this.chart.replaceChildren(...chart(minutes({ at_ms: at, history }), at));
  }
}

const SVG = "http://www.w3.org/2000/svg";
const LINES = [["p99", "ttft_p99_ms"], ["p95", "ttft_p95_ms"], ["p50", "ttft_p50_ms"]];

/** A line chart by minute; a minute without a request is a gap. */
function chart(rows, at) {
  const known = rows.filter((row) => row.ttft_p99_ms !== null);
  if (!known.length) return [];
  const until = lastMinute(at) + 1;
  const most = Math.max(...known.map((row) => row.ttft_p99_ms)) || 1;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${MINUTES_SHOWN - 1} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const last = known.at(-1);
  svg.setAttribute("aria-label", `Time to the first token by minute, up to ${span(most)}. At ${clock(last.minute_us)} UTC: p50 ${span(last.ttft_p50_ms)}, p95 ${span(last.ttft_p95_ms)}, p99 ${span(last.ttft_p99_ms)}.`);
  const byMinute = new Map(known.map((row) => [row.minute_us / 60_000_000, row]));
  for (const [name, field] of LINES) {
    let d = "";
    let pen = false;
    for (let x = 0; x < MINUTES_SHOWN; x += 1) {
      const row = byMinute.get(until - MINUTES_SHOWN + x);
      if (row) d += `${pen ? "L" : "M"}${x} ${(100 - (row[field] / most) * 96).toFixed(2)}${pen ? "" : "h0.001"}`;
      pen = Boolean(row);
    }
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", d);
    path.setAttribute("class", name);
    svg.append(path);
  }
  const from = clock((until - MINUTES_SHOWN) * 60_000_000);
  const legend = LINES.map(([name]) => el("span", `key ${name}`, name));
  return [
    el("div", "legend", el("span", "top", span(most)), el("span", "keys", ...legend)),
    svg,
    el("div", "legend", el("span", "", `${from} UTC`), el("span", "", `${clock((until - 1) * 60_000_000)} UTC`)),
  ];
}
