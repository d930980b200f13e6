// Lists of the chosen range from telemetry: requests, and events of the fleet.

import { el } from "./dom.js";
import { exportButtons } from "./ops-export.js";
import { span, whole } from "./ops-rules.js";
import { filters, rangeText, SORTS, windowOf } from "./ops-state.js";
import { Table } from "./ops-table.js";
import { bothOfRange, moment, times } from "./ops-time.js";

const ROWS = 100;
const ROWS_MAX = 1000; // as many as telemetry gives
const BAD = ["failed", "refused"];

/** The id by which telemetry finds a request. */
export const idOf = (row) => row.stream || row.id;

const timeOf = (us) => {
  const { utc, local } = times(us / 1000);
  return { text: utc, sub: local, title: moment(us / 1000) };
};

function columns([key, title, phase]) {
  const ofPhase = { title, name: "number", of: (row) => span((row.phase_us ?? 0) / 1000) };
  return [
    { title: "Ended (UTC)", name: "name", of: (row) => timeOf(row.at_us) },
    { title: "Status", name: "", of: (row) => ({ text: row.ended, sub: row.error_code ?? "", tone: BAD.includes(row.ended) ? "bad" : "" }) },
    { title: "ID", name: "far", of: (row) => ({ id: idOf(row) }) },
    { title: "Tenant", name: "far", of: (row) => row.tenant },
    { title: "Model", name: "far", of: (row) => row.model || "–" },
    { title: "Replica", name: "far", of: (row) => (row.replica ? { id: row.replica, canCopy: false } : "–") },
    { title: "Prompt, output", name: "number far", about: "Prompt tokens and output tokens", of: (row) => `${whole(row.prompt_tokens)}, ${whole(row.output_tokens)}` },
    ...(phase && key !== "ttft" && key !== "total" ? [ofPhase] : []),
    { title: "TTFT", name: "number", about: "Time to first token", of: (row) => (row.ttft_us ? span(row.ttft_us / 1000) : "–") },
    { title: "Total", name: "number", of: (row) => span(row.wall_us / 1000) },
  ];
}

const exported = (row) => ({
  ended_utc: new Date(row.at_us / 1000).toISOString(),
  status: row.ended,
  error_code: row.error_code ?? "",
  id: idOf(row),
  tenant: row.tenant,
  model: row.model,
  replica: row.replica,
  prompt_tokens: row.prompt_tokens,
  output_tokens: row.output_tokens,
  ttft_ms: row.ttft_us ? row.ttft_us / 1000 : null,
  total_ms: row.wall_us / 1000,
});

/** Words of the filters: `, tenant acme, model m, failed`. */
const filterText = ({ tenant, model, status }) => [tenant && `tenant ${tenant}`, model && `model ${model}`, status].filter(Boolean).map((part) => `, ${part}`).join("");

export class Requests {
  constructor(node, note, tools, { session, about, announce, onRow, onMore }) {
    Object.assign(this, { node, note, session, onRow });
    this.rows = [];
    this.top = ROWS;
    this.more = el("button", "more", `Show up to ${whole(ROWS_MAX)}`);
    this.more.type = "button";
    this.more.hidden = true;
    this.more.addEventListener("click", () => {
      this.top = ROWS_MAX;
      onMore();
    });
    tools.append(exportButtons("requests", () => this.rows.map(exported), about, announce));
    node.append(this.more);
  }

  async load(state, signal) {
    const sort = SORTS.find(([key]) => key === state.sort);
    const given = { ...windowOf(state), ...filters(state), top: this.top, ...(sort[2] && { phase: sort[2] }) };
    const rows = await this.session.get(`/traces${sort[2] && "/slow"}?${new URLSearchParams(given)}`, signal);
    if (signal.aborted) return;
    if (this.sort !== sort[0]) {
      this.table?.node.remove();
      this.table = new Table("List of requests", columns(sort), { onRow: this.onRow });
      this.node.prepend(this.table.node);
      this.sort = sort[0];
    }
    this.rows = rows;
    this.table.node.hidden = !rows.length;
    this.table.update(rows.map((row) => [`${idOf(row)} ${row.id} ${row.at_us}`, row]));
    this.more.hidden = rows.length < this.top || this.top >= ROWS_MAX;
    const where = `${rangeText(state, bothOfRange)}${filterText(state)}`;
    const which = sort[2] ? `longest first by ${sort[1] === "TTFT" ? "TTFT" : sort[1].toLowerCase()}` : "newest first";
    const many = rows.length < this.top ? "" : "The first ";
    this.say(rows.length ? `${many}${whole(rows.length)} ${rows.length === 1 ? "request" : "requests"}, ${which}: ${where}.` : `No requests, according to telemetry: ${where}.`);
  }

  say(text) {
    if (this.note.textContent !== text) this.note.textContent = text;
  }

  /** Says why nothing could be loaded; a list that is shown is an old one. */
  fail(text) {
    this.say(this.table && !this.table.node.hidden ? `${text} This list is old.` : text);
  }

  forget() {
    this.top = ROWS;
    this.rows = [];
    this.more.hidden = true;
    if (this.table) this.table.node.hidden = true;
  }
}

export class Events {
  constructor(node, note, tools, { session, about, announce }) {
    Object.assign(this, { note, session });
    this.rows = [];
    this.table = new Table("List of fleet events", [
      { title: "When (UTC)", name: "name", of: (row) => timeOf(row.at_us) },
      { title: "Event", name: "", of: (row) => [row.what, row.state].filter(Boolean).join(": ") },
      { title: "Pool", name: "far", of: (row) => row.pool || "–" },
      { title: "Replica", name: "", of: (row) => (row.replica ? { id: row.replica, canCopy: false } : "–") },
      { title: "Reason", name: "", of: (row) => row.reason || "–" },
      { title: "Source", name: "far", of: (row) => row.source },
    ]);
    this.table.node.hidden = true;
    node.append(this.table.node);
    const write = () => this.rows.map(({ at_us: us, ...row }) => ({ at_utc: new Date(us / 1000).toISOString(), ...row }));
    tools.append(exportButtons("fleet events", write, about, announce));
  }

  async load(state, signal) {
    const given = { ...windowOf(state), ...(state.range === "live" && { since: "1h" }), top: state.range === "live" ? 20 : ROWS };
    const rows = await this.session.get(`/traces/queries/fleet?${new URLSearchParams(given)}`, signal);
    if (signal.aborted) return;
    this.rows = rows;
    this.table.node.hidden = !rows.length;
    this.table.update(rows.map((row) => [`${row.at_us} ${row.what} ${row.replica} ${row.source}`, row]));
    this.say(rows.length ? "" : "No events, according to telemetry.");
  }

  say(text) {
    if (this.note.textContent !== text) this.note.textContent = text;
  }

  fail(text) {
    this.say(this.table.node.hidden ? text : `${text} This list is old.`);
  }

  forget() {
    this.rows = [];
    this.table.node.hidden = true;
  }
}
