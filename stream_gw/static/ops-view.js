// The view of a snapshot. Only changed cells are written, so that scrolling, focus and selection stay.

import { el, icon } from "./dom.js";
import { count, figure, lastMinute, longest, minutes, percent, replicas, seconds, span, waiting, whole } from "./ops-rules.js";
import { fill, Table } from "./ops-table.js";
import { both, times } from "./ops-time.js";

const MODELS_SHOWN = 3;
const SPARK_POINTS = 40;
const LONG_WAIT_S = 5;

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

  /** `ranged`: `{total, text, seconds}` of a range or filter that telemetry was asked for; null: the live figures. */
  show(snapshot, ranged) {
    for (const [title, content] of [...nowTiles(snapshot), ...(ranged ? rangeTiles(snapshot, ranged) : lastTiles(snapshot))]) {
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

function* nowTiles({ fleet, gateway }) {
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
  yield ["Load", fleet ? { text: slots ? percent(asked / slots) : asked ? "no slot" : "0 %", sub: `${whole(asked)} running or waiting, ${count(slots, "slot")}`, share: slots ? asked / slots : Number(asked > 0), tone: asked > slots ? "warn" : "" } : unknown];
  yield ["Pool queue", fleet ? { text: whole(waits), sub: waits ? `oldest ${seconds(oldest)}` : "empty", tone: oldest >= LONG_WAIT_S ? "warn" : "" } : unknown];
  yield ["Output tokens", fleet ? { text: `${figure(sum((pool) => pool.tokens_per_s))}/s`, sub: "all replicas" } : unknown];
  const lagging = gateway.lagging ? `, ${whole(gateway.lagging)} too slow` : "";
  yield ["Open streams", { text: whole(gateway.open_streams), sub: `this gateway; ${count(gateway.open_sockets, "socket")}${lagging}` }];
}

/** The live range: the fleet's last minute if telemetry has it, otherwise this gateway's figures. */
function* lastTiles({ at_ms: at, here, history, telemetry }) {
  const minute = lastMinute(at) * 60_000_000;
  const last = minutes({ at_ms: at, history }).find((row) => row.minute_us === minute);
  const when = `fleet, minute of ${times(minute / 1000, { hasSeconds: false }).utc} UTC`;
  if (history && telemetry.state === "ok") yield ["Requests", { text: `${figure((last?.requests ?? 0) / 60)}/s`, sub: when }];
  else yield ["Requests", { text: `${figure(here.requests_per_s)}/s`, sub: "this gateway, last minute" }];
  const first = here.ttft[0];
  if (last && last.ttft_p99_ms !== null) yield ["TTFT p99", { text: span(last.ttft_p99_ms), sub: `p50 ${span(last.ttft_p50_ms)}; ${when}` }];
  else yield ["TTFT p99", first ? { text: span(first.p99_ms), sub: `p50 ${span(first.p50_ms)}; this gateway, ${seconds(here.window_s)}` } : { text: "–", sub: "no request yet" }];
  const shed = Object.values(here.sheds).reduce((total, number) => total + number, 0);
  yield ["Failed, rejected", { text: `${whole(here.ended.failed ?? 0)}, ${whole(shed)}`, sub: `this gateway, last ${seconds(here.window_s)}`, tone: shed || here.ended.failed ? "warn" : "" }];
}

function* rangeTiles(snapshot, { total, text, rangeS }) {
  const { requests, failed, refused } = total;
  yield ["Requests", { text: whole(requests), sub: `${figure(requests / rangeS)}/s; ${text}` }];
  yield ["TTFT p99", total.ttft_p99_ms === null ? { text: "–", sub: `no first token; ${text}` } : { text: span(total.ttft_p99_ms), sub: `p50 ${span(total.ttft_p50_ms)}; ${text}` }];
  const share = requests ? `${(100 * (failed + refused)) / requests < 1 && failed + refused ? "under 1 %" : percent((failed + refused) / requests)} of requests; ` : "";
  yield ["Failed, rejected", { text: `${whole(failed)}, ${whole(refused)}`, sub: `${share}${text}`, tone: failed ? "warn" : "" }];
}

// Pools

const STATES = { ready: "", lost: "bad", draining: "warn", new: "", starting: "warn", warming: "warn", warm: "", sleeping: "" };

const COLUMNS = [
  { title: "Replica", name: "name", of: (row) => ({ id: row.replica, text: row.replica, sub: row.kind, title: row.kind }) },
  { title: "State", name: "state", of: (row) => (row.blocked ? { text: "takes none", sub: row.blocked, title: row.blocked, tone: "bad" } : { text: row.state, tone: STATES[row.state] ?? "warn" }) },
  { title: "Last 5 min", name: "sparks", of: (row) => ({ spark: row.spark }) },
  {
    title: "Running", name: "number", about: "Sequences that the engine computes / its maximum (max-num-seqs)",
    of: (row) => ({ text: row.slots ? `${row.running} / ${row.slots}` : "–", share: row.slots ? row.running / row.slots : 0 }),
  },
  { title: "Engine queue", name: "number", about: "Sequences that wait in the engine for a slot", of: (row) => ({ text: whole(row.waiting), tone: row.waiting ? "warn" : "" }) },
  { title: "KV cache", name: "number", about: "Share of the KV cache in use", of: (row) => (row.kv_used === null ? "–" : { text: percent(row.kv_used), share: row.kv_used, tone: row.kv_used >= 0.95 ? "warn" : "" }) },
  { title: "Queue p99", name: "number", about: "Time from a request's arrival at the replica until its prefill starts, 99th percentile of the last minute", of: (row) => ({ text: span(row.queue_p99_ms), tone: row.queue_p99_ms >= 1000 ? "warn" : "" }) },
  { title: "Tokens/s", name: "number", about: "Output tokens per second", of: (row) => figure(row.tokens_per_s) },
  { title: "In flight", name: "number far", about: "Streams that the replica runs or is about to receive / the number at which placement chooses another replica", of: (row) => (row.room ? `${row.in_flight} / ${row.room}` : `${row.in_flight}`) },
  { title: "Prefix hits", name: "number far", about: "Prefix cache hit rate: share of the prompt tokens that the replica found in its KV cache", of: (row) => (row.prefix_hits === null ? "–" : percent(row.prefix_hits)) },
  { title: "Lease", name: "number far", about: "Time until the lease expires and the replica counts as dead", of: (row) => (row.lease_left_s < 0 ? { text: `expired ${seconds(-row.lease_left_s)} ago`, tone: "bad" } : `${row.lease_left_s.toFixed(1)} s left`) },
];

const FIGURES = {
  load: { name: "load", format: percent, most: (values) => Math.max(1, ...values), isHigh: (value) => value > 1 },
  kv: { name: "KV cache", format: percent, most: () => 1, isHigh: (value) => value >= 0.95 },
  queue: { name: "engine queue", format: whole, most: (values) => Math.max(4, ...values), isHigh: (value) => value > 0 },
};

/** What the sparkline of a replica shows; undefined: there is no sample yet. */
function sparkOf(samples, figure_, at) {
  const points = samples.filter((_, index) => (samples.length - 1 - index) % Math.ceil(samples.length / SPARK_POINTS) === 0);
  if (!points.length) return undefined;
  const { name, format, most, isHigh } = FIGURES[figure_];
  const values = samples.map(([, value]) => value);
  const label = `${name}: now ${format(values.at(-1))}, ${format(Math.min(...values))} to ${format(Math.max(...values))} in the last ${seconds((at - samples[0][0]) / 1000)}`;
  return { points, most: most(values), until: at, label, isHigh: isHigh(values.at(-1)) };
}

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

  show(pool, { samples, figure: shown, at }) {
    const all = replicas(pool);
    const states = Object.entries(pool.states).sort().map(([state, number]) => `${whole(number)} ${state}`);
    const first = pool.ttft_p99_ms === null ? "" : ` · TTFT p50 ${span(pool.ttft_p50_ms)}, p99 ${span(pool.ttft_p99_ms)} (last minute)`;
    text(this.facts, `${states.join(", ") || "no replica"} · ${whole(pool.asked)} running or waiting, ${count(pool.slots, "ready slot")} · ${figure(pool.tokens_per_s)} tokens/s${first}`);
    const { plan } = pool;
    text(this.plan, plan ? `Plan: ${plan.ready} ready, ${plan.warm} warm, ${plan.pods} in all${plan.reason ? `: ${plan.reason}` : ""}${plan.at_ms ? ` (since ${both(plan.at_ms, { hasSeconds: false })})` : ""}` : "");
    const tiers = pool.tiers.map(({ tier, waiting: waits, oldest_s: oldest }) => ({
      tone: waits ? (oldest >= LONG_WAIT_S ? "warn" : "some") : "",
      text: waits ? `${tier}: ${count(waits, "waits", "wait")}, oldest ${seconds(oldest)}` : `${tier}: empty`,
    }));
    if (!waiting(pool)) tiers.splice(0, tiers.length, { tone: "", text: "queue empty" });
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
    this.table.update(
      pool.replicas.map((row) => [row.replica, { ...row, kind: common ? "" : kindOf(row), spark: sparkOf(samples.of(row.replica, shown), shown, at) }]),
    );
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

  /** `model`: only pools that serve it; empty: all. `sparks`: `{samples, figure, at}`. */
  show(fleet, model, sparks) {
    const all = fleet?.pools ?? [];
    const pools = model ? all.filter((pool) => pool.replicas.some(({ models }) => models.includes(model))) : all;
    const left = (fleet?.pools_all ?? 0) - all.length;
    text(this.note, !fleet ? "No data of the fleet yet." : all.length && !pools.length ? `No pool that is shown serves ${model}.` : !pools.length ? "There is no pool: no replica has joined, and no request waits." : left > 0 ? `${count(left, "more pool")} ${left === 1 ? "is" : "are"} not shown.` : "");
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
      view.show(pool, sparks);
      if (before.nextSibling !== view.node) before.after(view.node);
      before = view.node;
    }
  }
}
