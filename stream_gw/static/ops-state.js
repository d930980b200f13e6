// What the page shows: time range, filters, order. It is kept in the page's address, so that a link shows the same.

export const RANGES = [
  ["live", "Live", 15 * 60],
  ["15m", "15 min", 15 * 60],
  ["1h", "1 h", 3600],
  ["24h", "24 h", 24 * 3600],
  ["custom", "Custom", 0],
];
export const STATUSES = ["completed", "incomplete", "cancelled", "failed", "refused", "left", "stalled", "drained"];
/** Orders of the list of requests: key, title, phase in `/traces/slow`. */
export const SORTS = [
  ["newest", "Newest", ""],
  ["total", "Total time", "wall"],
  ["ttft", "TTFT", "ttft"],
  ["pool_queue", "Pool queue", "pool_queue"],
  ["engine_queue", "Engine queue", "engine_queue"],
  ["prefill", "Prefill", "prefill"],
  ["decode", "Decode", "decode"],
  ["recovery", "Recovery", "recovery"],
  ["client_stall", "Client stall", "client_stall"],
];
export const SPARKS = [["load", "Load"], ["kv", "KV cache"], ["queue", "Queue"]];

const DEFAULTS = { range: "live", from: 0, to: 0, tenant: "", model: "", status: "", sort: "newest", axis: "fit", spark: "load" };
const TEXT_MAX = 256;
const MINUTE_S = 60;
const STEPS_S = [60, 300, 900, 3600, 6 * 3600, 86_400];
const STEPS_MAX = 120;
const LATE_MS = 15_000; // telemetry's data is some seconds old

const known = (choices, value, otherwise) => (choices.some(([key]) => key === value) ? value : otherwise);

/** Parses the query string of the address; what it does not know has its default. */
export function parse(search) {
  const query = new URLSearchParams(search);
  const text = (name) => (query.get(name) ?? "").slice(0, TEXT_MAX);
  const state = { ...DEFAULTS, tenant: text("tenant"), model: text("model") };
  state.status = STATUSES.includes(text("status")) ? text("status") : "";
  state.sort = known(SORTS, text("sort"), DEFAULTS.sort);
  state.spark = known(SPARKS, text("spark"), DEFAULTS.spark);
  state.axis = text("axis") === "full" ? "full" : "fit";
  state.range = known(RANGES, text("range"), DEFAULTS.range);
  const [from, to] = ["from", "to"].map((name) => Date.parse(text(name)));
  if (from < to) Object.assign(state, { from, to });
  else if (state.range === "custom") state.range = DEFAULTS.range;
  if (state.range !== "custom") state.from = state.to = 0;
  return state;
}

/** The query string of a state, without what has its default. */
export function serialize(state) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (value === DEFAULTS[name]) continue;
    query.set(name, name === "from" || name === "to" ? new Date(value).toISOString() : value);
  }
  const text = query.toString();
  return text && `?${text}`;
}

/** The same state with a fixed time range, for a link that shows the same later. */
export function pinned(state, now) {
  const [, , seconds] = RANGES.find(([key]) => key === state.range);
  return seconds ? { ...state, range: "custom", from: Math.floor(now / 1000 - seconds) * 1000, to: Math.floor(now / 1000) * 1000 } : state;
}

export const isFiltered = ({ tenant, model, status }) => Boolean(tenant || model || status);

/** The filters of a query to telemetry. */
export const filters = ({ tenant, model, status }) => Object.fromEntries(Object.entries({ tenant, model, ended: status }).filter(([, value]) => value));

/** The time of a query to telemetry. A relative range is relative to telemetry's clock. */
export function windowOf(state) {
  if (state.range === "custom") return { since: new Date(state.from).toISOString(), until: new Date(state.to).toISOString() };
  return { since: state.range === "live" ? "15m" : state.range };
}

/** `{fromS, untilS, stepS}` of the charts: whole steps, up to the last minute that is complete. */
export function stepsOf(state, now) {
  const isCustom = state.range === "custom";
  const seconds = isCustom ? (state.to - state.from) / 1000 : RANGES.find(([key]) => key === state.range)[2];
  const until = Math.min(isCustom ? state.to : Infinity, now - LATE_MS) / 1000;
  const untilS = isCustom && until * 1000 === state.to ? Math.ceil(until / MINUTE_S) * MINUTE_S : Math.floor(until / MINUTE_S) * MINUTE_S;
  const stepS = STEPS_S.find((step) => seconds / step <= STEPS_MAX) ?? STEPS_S.at(-1);
  const begins = isCustom ? state.from / 1000 : untilS - seconds;
  const fromS = Math.floor(begins / stepS) * stepS;
  return { fromS, untilS: Math.max(untilS, fromS + MINUTE_S), stepS };
}

/** The range in words. `ofRange`: text of two moments. */
export function rangeText(state, ofRange) {
  if (state.range === "custom") return ofRange(state.from, state.to);
  const [, label] = RANGES.find(([key]) => key === state.range);
  return `last ${state.range === "live" ? "15 min" : label}`;
}
