// Problems in a snapshot, the worst first, and the format of figures. Pure.

const WAIT_S_WARN = 5;
const WAIT_S_BAD = 30;
const KV_WARN = 0.95;
const QUEUE_MS_WARN = 1000;
const FAILED_SHARE_WARN = 0.01;
const NAMES_SHOWN = 3;
const LATE_MS = 15_000; // telemetry is queried every 10 s, and its data is some seconds old

export const count = (number, one, many = `${one}s`) => `${whole(number)} ${number === 1 ? one : many}`;

export const whole = (number) => Math.round(number).toLocaleString("en");

export const figure = (number) => (number >= 100 || Number.isInteger(number) ? whole(number) : number >= 10 ? number.toFixed(1) : number.toFixed(2));

export const percent = (share) => `${Math.round(share * 100)} %`;

/** Text of a duration in milliseconds. */
export function span(ms) {
  const size = Math.abs(ms);
  if (!size) return "0 ms";
  if (size < 1) return `${ms.toFixed(2)} ms`;
  if (size < 10) return `${ms.toFixed(1)} ms`;
  if (size < 1000) return `${Math.round(ms)} ms`;
  if (size < 600_000) return `${(ms / 1000).toFixed(1)} s`;
  return `${Math.round(ms / 60_000)} min`;
}

export const seconds = (s) => (s < 10 ? `${s.toFixed(1)} s` : s < 180 ? `${Math.round(s)} s` : `${Math.round(s / 60)} min`);

export const longest = (pool) => pool.tiers.reduce((found, tier) => Math.max(found, tier.waiting ? tier.oldest_s : 0), 0);

export const waiting = (pool) => pool.tiers.reduce((sum, tier) => sum + tier.waiting, 0);

export const replicas = (pool) => Object.values(pool.states).reduce((sum, number) => sum + number, 0);

const sentence = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);

function names(rows) {
  const more = rows.length - NAMES_SHOWN;
  return rows.slice(0, NAMES_SHOWN).map(({ replica }) => replica).join(", ") + (more > 0 ? ` and ${more} more` : "");
}

/** The newest minute that telemetry has completely, in minutes since 1970. */
export const lastMinute = (atMs) => Math.floor((atMs - LATE_MS) / 60_000) - 1;

/** The fleet's minutes up to the last complete one. A minute without a request has no row. */
export function minutes({ at_ms: at, history }) {
  return (history ?? []).filter(({ minute_us: minute }) => minute && minute / 60_000_000 <= lastMinute(at));
}

function* ofPool(pool) {
  const ready = pool.states.ready ?? 0;
  const wait = longest(pool);
  const { plan } = pool;
  const isAsleep = plan?.ready === 0 && !waiting(pool); // the plan is zero replicas, and no request waits
  if (!ready && !isAsleep) {
    const others = Object.entries(pool.states).map(([state, number]) => `${number} ${state}`).join(", ");
    yield { level: "bad", key: `none ${pool.pool}`, text: `Pool ${pool.pool} has no ready replica${others ? ` (${others})` : ""}: ${plan ? "its requests wait for one to start" : "its requests wait or are rejected"}.` };
  } else if (plan && ready < plan.ready) {
    yield { level: "warn", key: `plan ${pool.pool}`, text: `Pool ${pool.pool} has ${ready} of the ${count(plan.ready, "ready replica")} that are wanted (${plan.reason}).` };
  }
  if (plan?.yielding) yield { level: "warn", key: `yield ${pool.pool}`, text: `Pool ${pool.pool}: batch work yields to interactive and standard requests, and waits in the queue.` };
  const lost = pool.replicas.filter(({ state }) => state === "lost");
  if (lost.length) yield { level: "bad", key: `lost ${pool.pool}`, text: `Pool ${pool.pool}: ${count(pool.states.lost, "replica")} died or cannot reach Redis (${names(lost)}).` };
  if (wait >= WAIT_S_WARN) {
    const tier = pool.tiers.find((one) => one.waiting && one.oldest_s === wait).tier;
    yield { level: wait >= WAIT_S_BAD ? "bad" : "warn", key: `wait ${pool.pool}`, text: `Pool ${pool.pool}: ${count(waiting(pool), "request waits", "requests wait")} for a replica, the oldest for ${seconds(wait)} (${tier}).` };
  }
  const draining = pool.replicas.filter(({ state }) => state === "draining");
  if (draining.length) yield { level: "warn", key: `drain ${pool.pool}`, text: `Pool ${pool.pool}: ${names(draining)} ${draining.length === 1 ? "drains and takes" : "drain and take"} no new request.` };
  const slow = pool.replicas.filter((row) => row.state === "ready" && row.queue_p99_ms >= QUEUE_MS_WARN);
  if (slow.length) {
    const most = Math.max(...slow.map((row) => row.queue_p99_ms));
    yield { level: "warn", key: `slow ${pool.pool}`, text: `Pool ${pool.pool}: requests wait up to ${span(most)} in the engine queue of ${names(slow)} before prefill (p99).` };
  }
  const full = pool.replicas.filter((row) => row.kv_used >= KV_WARN);
  if (full.length) yield { level: "warn", key: `kv ${pool.pool}`, text: `Pool ${pool.pool}: the KV cache of ${names(full)} is full to ${percent(KV_WARN)} or more.` };
}

/** `[{level, key, text}]`; `key` stays the same while only figures change. */
export function troubles(snapshot) {
  const { fabric, fleet, telemetry, here } = snapshot;
  const found = [];
  if (fabric.state === "away") {
    const old = fleet ? ` The figures of the fleet are ${seconds(fabric.age_s)} old.` : "";
    found.push({ level: "bad", key: "fabric", text: `This gateway cannot read Redis: ${sentence(fabric.message)}${old}` });
  } else if (fleet && !fleet.pools.length) {
    found.push({ level: "bad", key: "empty", text: "No replica has joined this fleet. Start one with stream-gw agent." });
  }
  for (const pool of fleet?.pools ?? []) found.push(...ofPool(pool));
  if (telemetry.state === "away") {
    found.push({ level: "warn", key: "telemetry", text: `No history and no traces: ${sentence(telemetry.message)} The rest of this page is live.` });
  }
  const shed = Object.entries(here.sheds);
  if (shed.length) {
    const where = shed.map(([layer, number]) => `${layer} ${whole(number)}`).join(", ");
    const sum = shed.reduce((all, [, number]) => all + number, 0);
    found.push({ level: "warn", key: "shed", text: `This gateway rejected ${count(sum, "request")} because of overload in the last ${seconds(here.window_s)} (${where}).` });
  }
  const late = minutes(snapshot).slice(-5);
  const asked = late.reduce((sum, row) => sum + row.requests, 0);
  const failed = late.reduce((sum, row) => sum + row.failed, 0);
  if (failed && failed >= FAILED_SHARE_WARN * asked) {
    found.push({ level: "warn", key: "failed", text: `${whole(failed)} of ${count(asked, "request")} of the whole fleet failed in the last ${count(late.length, "minute")}.` });
  }
  return found.sort((a, b) => (a.level > b.level ? 1 : a.level < b.level ? -1 : 0));
}
