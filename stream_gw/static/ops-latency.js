// TTFT, ITL and request rates of the chosen range: charts from telemetry, and tables by pool.

import { el } from "./dom.js";
import { Chart } from "./ops-chart.js";
import { exportButtons } from "./ops-export.js";
import { figure, seconds, span, whole } from "./ops-rules.js";
import { filters, isFiltered, stepsOf } from "./ops-state.js";
import { Table } from "./ops-table.js";

const quantiles = (part) => ["p99", "p95", "p50"].map((name) => ({ name, label: name, of: (row) => row[`${part}_${name}_ms`] }));
const rate = (name, label, of) => ({ name, label, of: (row) => of(row) / row.covered_s });
const RATES = [
  rate("all", "all", (row) => row.requests),
  rate("refused", "refused", (row) => row.refused),
  rate("failed", "failed", (row) => row.failed),
];
const perSecond = (value) => `${value && value < 0.01 ? "< 0.01" : figure(value)}/s`;
const spanOf = (ms) => (ms === null ? "–" : span(ms));
const QUANTILES = ["p50", "p95", "p99"].map((name) => ({ title: name, name: "number", of: (row) => spanOf(row[`${name}_ms`]) }));
const ITL_ABOUT = "Inter-token latency: time between two tokens of a stream, as the engine emits them. Lower bounds of the buckets, which are 14 to 25 % wide.";

/** The rows of one step in a line, as the charts and the export take it. */
function steps(rows, { untilS, stepS }) {
  return rows
    .filter((row) => row.part === undefined || row.part === "step")
    .map(({ part, pool, step_us: us, ...row }) => ({ at: us / 1000, covered_s: Math.min(stepS, Math.max(untilS - us / 1e6, 60)), ...row }));
}

export class Latency {
  /** `onStep(row, seconds)`: a step of a chart was chosen; `onAxis()`: the other axis is wanted. */
  constructor(node, { session, about, announce, onStep, onAxis }) {
    this.session = session;
    this.total = null;
    this.series = [];
    this.itl = [];
    const common = (name, rows) => ({ onStep: (row) => onStep(row, this.range.stepS), onAxis, exports: exportButtons(name, rows, about, announce) });
    const exported = (rows) => rows().map(({ at, covered_s: covered, ...row }) => ({ step_utc: new Date(at).toISOString(), step_s: this.range.stepS, ...row }));
    this.ttft = new Chart("TTFT", quantiles("ttft"), span, { about: "Time to first token, at the gateway", ...common("TTFT", () => exported(() => this.series)) });
    this.gaps = new Chart("ITL", quantiles("itl"), span, { about: ITL_ABOUT, ...common("ITL", () => exported(() => this.itl)) });
    this.rates = new Chart("Requests", RATES, perSecond, common("request rates", () => exported(() => this.series)));
    const number = { title: "Requests", name: "number", of: (row) => whole(row.count) };
    const pool = (none) => ({ title: "Pool", name: "name", of: (row) => row.pool || none });
    const ends = { title: "Failed, refused", name: "number", of: (row) => ({ text: `${whole(row.failed)}, ${whole(row.refused)}`, tone: row.failed ? "warn" : "" }) };
    this.fleet = new Table("TTFT of the whole fleet, by pool", [pool("no pool"), number, ...QUANTILES, ends]);
    this.here = new Table("TTFT at this gateway, by pool", [pool("all pools"), number, ...QUANTILES]);
    this.fleetTitle = el("h3");
    this.fleetNode = el("article", "", this.fleetTitle, this.fleet.node);
    this.hereTitle = el("h3");
    this.hereNote = el("p", "line");
    this.hereNode = el("article", "", this.hereTitle, this.hereNote, this.here.node);
    node.append(el("div", "charts", this.ttft.node, this.gaps.node, this.rates.node), el("div", "halves", this.fleetNode, this.hereNode));
    this.range = { fromS: 0, untilS: 60, stepS: 60 };
    this.note = "Loading from telemetry …";
  }

  /** Whether the snapshots hold the steps of what is shown: the last 15 minutes without a filter. */
  isInFeed(state) {
    return state.range === "live" && !isFiltered(state);
  }

  /** Figures of this gateway and, for the live range without filters, those of the fleet. */
  receive({ here, gateway, history, telemetry }, state) {
    const title = `TTFT by pool, this gateway, last ${seconds(here.window_s)}`;
    if (this.hereTitle.textContent !== title) this.hereTitle.textContent = title;
    this.hereNode.hidden = state.range !== "live";
    const said = here.ttft.length ? "" : `${gateway.name} has sent no first token yet.`;
    if (this.hereNote.textContent !== said) this.hereNote.textContent = said;
    this.here.node.hidden = !here.ttft.length;
    this.here.update(here.ttft.map((row) => [row.pool, row]));
    const off = "No telemetry, so no history.";
    const away = "Telemetry does not answer.";
    if (telemetry.state !== "ok") this.note = telemetry.state === "off" ? off : telemetry.age_s > 30 && this.series.length ? `${away} These figures are ${seconds(telemetry.age_s)} old.` : away;
    else if (this.isInFeed(state)) this.note = history ? "" : "Loading from telemetry …";
    else if ([off, away].includes(this.note)) this.note = "";
    if (this.isInFeed(state) && history) {
      this.range = stepsOf(state, Date.now());
      const rows = history.map(({ minute_us: us, ...row }) => ({ part: us ? "step" : "pool", step_us: us, ...row }));
      this.take(rows, null);
    }
    this.show(state);
  }

  take(rows, total) {
    this.total = total;
    this.series = steps(rows, this.range);
    this.pools = rows.filter(({ part }) => part === "pool");
  }

  /** Loads the charts' steps from telemetry. */
  async load(state, signal) {
    const range = stepsOf(state, Date.now());
    const { ended, ...of } = filters(state);
    const given = { since: new Date(range.fromS * 1000).toISOString(), until: new Date(range.untilS * 1000).toISOString(), step_s: range.stepS, ...of };
    const suffix = state.tenant ? "_of_tenant" : "";
    const path = (name, more = {}) => `/traces/queries/${name}${suffix}?${new URLSearchParams({ ...given, ...more })}`;
    const [series, itl] = await Promise.all([
      this.isInFeed(state) ? null : this.session.get(path("series", ended ? { ended } : {}), signal),
      this.session.get(path("series_itl"), signal),
    ]);
    if (signal.aborted) return;
    this.range = range;
    this.itl = steps(itl, range);
    if (series) this.take(series, series.find(({ part }) => part === "all"));
    this.note = "";
    this.show(state);
  }

  /** Says why nothing could be loaded, and drops the steps of another range. */
  fail(message, state) {
    this.note = message;
    this.show(state);
  }

  /** Forgets what belongs to another range or filter. */
  forget() {
    Object.assign(this, { total: null, series: [], itl: [], pools: [], note: "Loading from telemetry …" });
  }

  show(state) {
    const more = { ...this.range, isFull: state.axis === "full" };
    const none = this.note || "No request in this range.";
    this.ttft.show({ rows: this.series, ...more, note: this.series.some((row) => row.ttft_p99_ms !== null) ? this.note : none });
    this.gaps.show({ rows: this.itl, ...more, note: !this.itl.length ? none : state.status ? "Of all outcomes: ITL is not kept by status." : "" });
    this.rates.show({ rows: this.series, ...more, note: this.series.length ? "" : none });
    const pools = this.pools ?? [];
    this.fleetNode.hidden = !pools.length;
    this.fleetTitle.textContent = `TTFT by pool, ${state.tenant ? `tenant ${state.tenant}` : "whole fleet"}`;
    this.fleet.update(pools.map((row) => [row.pool, { ...row, count: row.requests, p50_ms: row.ttft_p50_ms, p95_ms: row.ttft_p95_ms, p99_ms: row.ttft_p99_ms }]));
  }
}
