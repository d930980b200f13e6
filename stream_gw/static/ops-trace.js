// One request and its latency by phase, from `GET /v1/admin/traces/<id>/why`.

import { el } from "./dom.js";
import { percent, span, whole } from "./ops-rules.js";
import { idNode, Table } from "./ops-table.js";
import { moment, times } from "./ops-time.js";

const NAMES = {
  resume_gap_us: "no reader",
  gateway_us: "gateway",
  admission_us: "admission",
  pool_queue_us: "pool queue",
  engine_queue_us: "engine queue",
  prefill_us: "prefill",
  decode_us: "decode",
  fabric_us: "fabric",
  client_stall_us: "client stall",
  recovery_us: "recovery",
  check_us: "check and repair",
  steer_us: "steering",
  residual_us: "unaccounted",
  between: "between readers",
  overlap: "both readers",
  unrecorded: "not recorded",
};
const TRY = [["waited_us", "pool_queue_us"], ["inbox_us", "fabric_us"], ["engine_queue_us", "engine_queue_us"], ["prefill_us", "prefill_us"], ["decode_us", "decode_us"], ["check_us", "check_us"], ["steer_us", "steer_us"]];

export const nameOf = (phase) => NAMES[phase] ?? phase.replace(/_us$/, "");

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
    ...inputs(value),
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
  return el("p", "head", outcome, ` ${ofUs(value.wall_us)} · ${moment(value.began_us / 1000)}`);
}

function facts(value) {
  const price = Number(fact(value, "price_micro"));
  const first = value.readers.find((row) => row.ttft_us)?.ttft_us;
  const adapter = fact(value, "adapter");
  const pairs = [
    ["Stream", id(value.stream) ?? "none"],
    ["Request", id(fact(value, "request_id"))],
    ["Trace", id(fact(value, "trace_id"))],
    ["Tenant", fact(value, "tenant")],
    ["Model", fact(value, "model") + (adapter ? ` + ${adapter}` : "")],
    ["Replica", id(fact(value, "replica"))],
    ["Pool", fact(value, "pool")],
    ["Gateway", fact(value, "gateway")],
    ["API", [fact(value, "dialect"), fact(value, "transport")].filter(Boolean).join(" over ")],
    ["Tokens", `prompt ${whole(value.prompt_tokens)}, of which ${whole(value.cached_tokens)} cached; output ${whole(value.output_tokens)}`],
    ["TTFT", first ? ofUs(first) : "no token"],
    ["Schema", fact(value, "schema_check") && `${fact(value, "schema_check")}, ${whole(fact(value, "repairs") || 0)} repairs`],
    ["Inputs", steered(value)],
    ["HTTP status", fact(value, "http_status") ? String(fact(value, "http_status")) : ""],
    ["Price", price ? `${(price / 1e6).toFixed(6)}` : ""],
    ["Cancelled at", fact(value, "cancel_point")],
    ["Same trace", value.other_streams.length ? el("span", "ids", ...value.other_streams.map((each) => idNode(each))) : ""],
  ];
  const shown = pairs.filter(([, text]) => text);
  return el("dl", "facts", ...shown.map(([name, text]) => el("div", "", el("dt", "", name), el("dd", "", typeof text === "string" ? el("bdi", "", text) : text))));
}

const id = (text) => (text ? idNode(text) : undefined);

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
    { title: "Replica", name: "", of: (row) => ({ id: row.replica, canCopy: false }) },
    { title: "Ended", name: "", of: (row) => ({ text: row.ended, sub: notes(row), tone: ["lost", "failed"].includes(row.ended) ? "bad" : "" }) },
    { title: "Pool queue", name: "number", of: (row) => ofUs(row.waited_us) },
    { title: "Inbox", name: "number", of: (row) => ofUs(row.inbox_us) },
    { title: "Engine queue", name: "number", about: "If the engine does not report when it began: the time that prefill does not explain", of: (row) => ofUs(row.engine_queue_us) },
    { title: "Prefill", name: "number", of: (row) => ofUs(row.prefill_us) },
    { title: "Decode", name: "number", of: (row) => ofUs(row.decode_us) },
    { title: "Max ITL", name: "number", about: "Longest inter-token latency of the attempt", of: (row) => (row.itl_max_us ? ofUs(row.itl_max_us) : "–") },
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
    return el("div", "try", el("span", "", `${row.attempt}.${row.epoch} `, idNode(row.replica, { canCopy: false })), track);
  });
  return el("div", "tries", table.node, ...bars);
}

/** What became of the client's inputs, in words. */
function steered(value) {
  const [applied, refused] = [fact(value, "inputs") || 0, fact(value, "inputs_refused") || 0];
  return [applied && `${whole(applied)} applied`, refused && `${whole(refused)} refused`].filter(Boolean).join(", ");
}

/** The client's inputs one by one: fields as in `InputTimes`. */
function inputs(value) {
  const found = value.attempts.flatMap((row) => (row.inputs_json ? JSON.parse(row.inputs_json) : []));
  if (!found.length) return [];
  const table = new Table("Inputs of the client to the running answer", [
    { title: "Input", name: "name", of: (row) => row.number },
    { title: "Came after", name: "number", about: "Since the request", of: (row) => (row.at_us ? ofUs(row.at_us - value.began_us) : "–") },
    { title: "Result", name: "", of: (row) => ({ text: row.result, sub: row.reason, tone: row.result === "refused" ? "warn" : "" }) },
    { title: "Waited", name: "number", about: "Until the replica applied or refused it", of: (row) => ofUs(row.waited_us) },
    { title: "Next token", name: "number", about: "From there to the first token of the next answer", of: (row) => (row.answered_us ? ofUs(row.answered_us) : "–") },
  ]);
  const rows = found.map(([at_us, result, reason, waited_us, answered_us = 0], at) => ({ number: String(at + 1), at_us, result, reason, waited_us, answered_us }));
  table.update(rows.map((row) => [row.number, row]));
  return [section("Inputs", table.node)];
}

function placement(value) {
  const reason = fact(value, "placement");
  const text = fact(value, "scores_json");
  const scores = text ? JSON.parse(text) : [];
  if (!reason && !scores.length) return [];
  const position = fact(value, "queue_position");
  const taken = fact(value, "replica");
  const table = new Table("Candidates of the placement", [
    { title: "Candidate", name: "name", of: ([replica]) => ({ id: replica, canCopy: false }) },
    { title: "Score", name: "number", about: "Expected TTFT, plus a little for crowding: the lowest wins", of: ([, score]) => (score < 0 ? "–" : span(score)) },
    { title: "Cached prefix", name: "number", about: "Prompt tokens that the replica was expected to have in its KV cache", of: ([, , matched]) => whole(matched ?? 0) },
    { title: "In flight", name: "number", of: ([, , , flight]) => whole(flight ?? 0) },
    { title: "Load", name: "number", of: ([, , , , load]) => span(load ?? 0) },
    { title: "Result", name: "", of: ([replica, , , , , barred]) => ({ text: [replica === taken && "taken", barred].filter(Boolean).join(", "), tone: barred ? "warn" : "" }) },
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
    { title: "Phase", name: "name", of: (row) => row.name },
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
    const items = value.fleet.map((row) => el("li", "", `${times(row.at_us / 1000).utc} UTC ${[row.what, row.replica, row.state, row.reason].filter(Boolean).join(" ")}`));
    found.push(section("In the pool at the same time", el("ul", "", ...items)));
  }
  return found;
}
