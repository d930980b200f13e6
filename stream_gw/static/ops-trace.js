// One request and its latency by phase, from `GET /v1/admin/traces/<id>/why`.

import { el } from "./dom.js";
import { Table } from "./ops-view.js";
import { percent, span, whole } from "./ops-rules.js";

const NAMES = {
  resume_gap_us: "nobody reads",
  gateway_us: "gateway",
  admission_us: "admission",
  pool_queue_us: "pool's queue",
  engine_queue_us: "engine's queue",
  prefill_us: "prefill",
  decode_us: "decode",
  fabric_us: "fabric",
  client_stall_us: "client stall",
  recovery_us: "recovery",
  residual_us: "not accounted for",
  between: "between readers",
  unrecorded: "not recorded",
};
const TRY = [["waited_us", "pool_queue_us"], ["inbox_us", "fabric_us"], ["engine_queue_us", "engine_queue_us"], ["prefill_us", "prefill_us"], ["decode_us", "decode_us"]];

export const nameOf = (phase) => NAMES[phase] ?? phase.replace(/_us$/, "");

export const moment = (us) => `${new Date(us / 1000).toISOString().slice(0, 23).replace("T", " ")} UTC`;

export const time = (us) => new Date(us / 1000).toISOString().slice(11, 19);

const ofUs = (us) => span(us / 1000);

/** The value of a field from the first row that has it: readers first, then attempts, the last one first. */
function fact(value, name) {
  const rows = [...value.readers, ...value.beside, ...[...value.attempts].reverse()];
  return rows.find((row) => row[name])?.[name] ?? "";
}

/** Nodes that show the response of `why`. */
export function explained(value) {
  return [
    head(value),
    el("p", "likely", el("strong", "", "Likely cause: "), el("bdi", "", value.likely)),
    ...value.missing.map((said) => el("p", "missing", said)),
    facts(value),
    section("Where the time went", waterfall(value)),
    ...(value.attempts.length ? [section("Attempts", attempts(value))] : []),
    ...placement(value),
    ...usual(value),
    ...others(value),
  ];
}

function section(title, ...children) {
  return el("section", "", el("h3", "", title), ...children);
}

function head(value) {
  const error = fact(value, "error_code");
  const bad = ["failed", "refused"].includes(value.outcome);
  const outcome = el("span", `outcome ${bad ? "bad" : ""}`, value.outcome + (error ? ` (${error})` : ""));
  return el("p", "head", outcome, ` ${ofUs(value.wall_us)} · ${moment(value.began_us)}`);
}

function facts(value) {
  const price = Number(fact(value, "price_micro"));
  const first = value.readers.find((row) => row.ttft_us)?.ttft_us;
  const adapter = fact(value, "adapter");
  const pairs = [
    ["Stream", value.stream || "none"],
    ["Request", fact(value, "request_id")],
    ["Trace", fact(value, "trace_id")],
    ["Tenant", fact(value, "tenant")],
    ["Model", fact(value, "model") + (adapter ? ` + ${adapter}` : "")],
    ["Replica", [fact(value, "replica"), fact(value, "pool") && `pool ${fact(value, "pool")}`].filter(Boolean).join(", ")],
    ["Gateway", fact(value, "gateway")],
    ["API", [fact(value, "dialect"), fact(value, "transport")].filter(Boolean).join(" over ")],
    ["Tokens", `${whole(value.prompt_tokens)} in, ${whole(value.cached_tokens)} of them cached; ${whole(value.output_tokens)} out`],
    ["First token", first ? `after ${ofUs(first)}` : "none"],
    ["HTTP status", fact(value, "http_status") ? String(fact(value, "http_status")) : ""],
    ["Price", price ? `${(price / 1e6).toFixed(6)}` : ""],
    ["Cancelled at", fact(value, "cancel_point")],
    ["Same trace", value.other_streams.join(", ")],
  ];
  const shown = pairs.filter(([, text]) => text);
  return el("dl", "facts", ...shown.map(([name, text]) => el("div", "", el("dt", "", name), el("dd", "", el("bdi", "", text)))));
}

function bar(className, from, us, whole_) {
  const piece = el("i", className);
  piece.style.left = `${(100 * Math.max(from, 0)) / whole_}%`;
  piece.style.width = `${(100 * us) / whole_}%`;
  return piece;
}

function waterfall(value) {
  const wall = Math.max(value.wall_us, 1);
  const body = el("tbody");
  let at = 0;
  let reader = 0;
  for (const { name, us, reader: number } of value.segments) {
    if (number && number !== reader && value.readers.length > 1) body.append(readerLine(number, value.readers[number - 1]));
    reader = number || reader;
    const head = el("th", "name", el("span", `swatch ${name}`), nameOf(name));
    head.scope = "row";
    // Clock skew can make phases longer than the request: a negative phase goes backwards
    const track = el("td", "track", bar(name, us < 0 ? at + us : at, Math.abs(us), wall));
    track.setAttribute("aria-hidden", "true");
    const row = el("tr", "segment", head, el("td", "number", ofUs(us)), el("td", "number", percent(us / wall)), track);
    row.dataset.us = String(us);
    body.append(row);
    at += us;
  }
  const total = el("th", "name", "sum");
  total.scope = "row";
  const foot = el("tr", "sum", total, el("td", "number", ofUs(at)), el("td", "number", percent(at / wall)), el("td"));
  foot.dataset.us = String(at);
  const heads = [["phase", "name"], ["time", "number"], ["share", "number"], ["", "track"]].map(([title, name]) => {
    const cell = el(title ? "th" : "td", name, title);
    if (title) cell.scope = "col";
    return cell;
  });
  const table = el("table", "waterfall", el("caption", "sr", "Where the time went, in order of time"), el("thead", "", el("tr", "", ...heads)), body, el("tfoot", "", foot));
  return el("div", "scroll", table);
}

function readerLine(number, row) {
  const frames = row.last_seq ? `, frames ${row.first_seq} to ${row.last_seq}` : "";
  const cell = el("th", "reader", `Reader ${number}: ${row.role} at ${row.gateway}, ${row.ended}${frames}`);
  cell.colSpan = 4;
  cell.scope = "rowgroup";
  return el("tr", "", cell);
}

function attempts(value) {
  const most = Math.max(1, ...value.attempts.map((row) => TRY.reduce((sum, [name]) => sum + row[name], 0)));
  const notes = (row) => [row.error_code, row.billed && "billed", row.ended === "lost" && "the replica died"].filter(Boolean).join(", ");
  const table = new Table("Attempts by replica", [
    { title: "Attempt", name: "name", of: (row) => `${row.attempt}.${row.epoch}` },
    { title: "Replica", name: "", of: (row) => row.replica },
    { title: "Ended", name: "", of: (row) => ({ text: row.ended, sub: notes(row), tone: ["lost", "failed"].includes(row.ended) ? "bad" : "" }) },
    { title: "Queue", name: "number", of: (row) => ofUs(row.waited_us) },
    { title: "Inbox", name: "number", of: (row) => ofUs(row.inbox_us) },
    { title: "Engine's queue", name: "number", about: "If the engine does not report when it began: the time that prefill does not explain", of: (row) => ofUs(row.engine_queue_us) },
    { title: "Prefill", name: "number", of: (row) => ofUs(row.prefill_us) },
    { title: "Decode", name: "number", of: (row) => ofUs(row.decode_us) },
    { title: "Tokens", name: "number", about: "Generated in this attempt / of the stream up to the attempt's end", of: (row) => `${whole(row.generated_tokens)} / ${whole(row.output_tokens)}` },
  ]);
  table.update(value.attempts.map((row) => [row.id, row]));
  const bars = value.attempts.map((row) => {
    let at = 0;
    const pieces = TRY.map(([name, phase]) => {
      const piece = bar(phase, at, row[name], most);
      at += row[name];
      return piece;
    });
    const track = el("span", "track", ...pieces);
    track.setAttribute("aria-hidden", "true");
    return el("div", "try", el("bdi", "", `${row.attempt}.${row.epoch} ${row.replica}`), track);
  });
  return el("div", "tries", table.node, ...bars);
}

function placement(value) {
  const reason = fact(value, "placement");
  const text = fact(value, "scores_json");
  const scores = text ? JSON.parse(text) : [];
  if (!reason && !scores.length) return [];
  const position = fact(value, "queue_position");
  const taken = fact(value, "replica");
  const table = new Table("Candidates of the placement", [
    { title: "Candidate", name: "name", of: ([replica]) => replica },
    { title: "Score", name: "number", about: "Expected time to the first token, plus a little for crowding: the lowest wins", of: ([, score]) => (score < 0 ? "–" : span(score)) },
    { title: "Prompt held", name: "number", about: "Tokens of the prompt that the replica was believed to have cached", of: ([, , matched]) => whole(matched ?? 0) },
    { title: "In flight", name: "number", of: ([, , , flight]) => whole(flight ?? 0) },
    { title: "Load", name: "number", of: ([, , , , load]) => span(load ?? 0) },
    { title: "", name: "", of: ([replica, , , , , barred]) => ({ text: [replica === taken && "taken", barred].filter(Boolean).join(", "), tone: barred ? "warn" : "" }) },
  ]);
  table.update(scores.map((one) => [one[0], one]));
  const why = `Reason: ${reason || "unknown"}${position ? `, position ${position} in the queue` : ""}.`;
  return [section("Placement", el("p", "line", why), ...(scores.length ? [table.node] : []))];
}

function usual(value) {
  const { what, members, figures } = value.cohort;
  if (!members) return [section("Comparison", el("p", "line", "Nothing to compare with yet: telemetry has no other finished request of this model."))];
  const spent = (name) => value.segments.reduce((sum, { name: each, us }) => sum + (each === name ? us : 0), 0);
  const rows = Object.keys(figures).filter((name) => name in NAMES).map((name) => ({ name: nameOf(name), here: spent(name), figures: figures[name] }));
  rows.push({ name: "whole", here: value.wall_us, figures: figures.wall_us });
  const shown = rows.filter(({ here, figures: [half, , most] }) => here || half || most);
  const table = new Table("Compared with similar requests", [
    { title: "", name: "name", of: (row) => row.name },
    { title: "this", name: "number", of: (row) => ({ text: ofUs(row.here), tone: row.here > row.figures[2] && row.here - row.figures[0] >= 1000 ? "bad" : "" }) },
    { title: "p50", name: "number", of: (row) => ofUs(row.figures[0]) },
    { title: "p95", name: "number", of: (row) => ofUs(row.figures[1]) },
    { title: "p99", name: "number", of: (row) => ofUs(row.figures[2]) },
  ]);
  table.update(shown.map((row) => [row.name, row]));
  const few = members < 30 ? " Too few for a comparison." : "";
  return [section("Comparison", el("p", "line", `${whole(members)} other requests (${what}).${few}`), table.node)];
}

function others(value) {
  const found = [];
  if (value.beside.length) {
    const items = value.beside.map((row) => el("li", "", `${row.role} at ${row.gateway}, ${row.ended}, ${ofUs(row.wall_us)}`));
    found.push(section("Also read by", el("ul", "", ...items)));
  }
  if (value.fleet.length) {
    const items = value.fleet.map((row) => el("li", "", `${time(row.at_us)} ${[row.what, row.replica, row.state, row.reason].filter(Boolean).join(" ")}`));
    found.push(section("In the pool at the same time", el("ul", "", ...items)));
  }
  return found;
}
