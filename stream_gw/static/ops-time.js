// Times in UTC and in the browser's time zone. Pure. Milliseconds since 1970, unless a name says otherwise.

const DAY_MS = 86_400_000;
const MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(" ");
const pad = (number) => String(number).padStart(2, "0");

/** A date whose UTC fields are the local ones. */
const local = (ms) => new Date(ms - new Date(ms).getTimezoneOffset() * 60_000);

/** Name of the browser's time zone at that time, such as GMT+1; empty: its time is UTC. */
export function zone(ms) {
  const minutes = -new Date(ms).getTimezoneOffset();
  if (!minutes) return "";
  const size = Math.abs(minutes);
  const rest = size % 60 ? `:${pad(size % 60)}` : "";
  return `GMT${minutes < 0 ? "-" : "+"}${Math.floor(size / 60)}${rest}`;
}

const clockOf = (date, hasSeconds) => date.toISOString().slice(11, hasSeconds ? 19 : 16);

const dayOf = (date) => `${MONTHS[date.getUTCMonth()]} ${date.getUTCDate()}`;

/** `{utc, local}`: clock times, with the day if it is not today's; `local` is empty where it is UTC. */
export function times(ms, { hasSeconds = true, now = Date.now() } = {}) {
  const isToday = (date, today) => Math.floor(date / DAY_MS) === Math.floor(today / DAY_MS);
  const text = (date, today) => (isToday(date, today) ? "" : `${dayOf(date)} `) + clockOf(date, hasSeconds);
  const here = zone(ms);
  return { utc: text(new Date(ms), now), local: here && `${text(local(ms), local(now))} ${here}` };
}

/** Text of a range: `10:00 to 11:00 UTC (11:00 to 12:00 GMT+1)`. */
export function bothOfRange(from, to) {
  const hasSeconds = Boolean(from % 60_000 || to % 60_000);
  const begin = times(from, { hasSeconds });
  const end = times(to, { hasSeconds, now: from });
  const here = zone(to);
  const local = here && ` (${begin.local.replace(` ${zone(from)}`, "")} to ${end.local})`;
  return `${begin.utc} to ${end.utc} UTC${local}`;
}

/** One text with both times: `06:21 UTC (07:21 GMT+1)`. */
export function both(ms, options) {
  const { utc, local: here } = times(ms, options);
  return `${utc} UTC${here ? ` (${here})` : ""}`;
}

/** The whole moment, for a person and a log: `2026-11-20 10:19:58.299 UTC (11:19:58 GMT+1)`. */
export function moment(ms) {
  const here = zone(ms);
  const utc = `${new Date(ms).toISOString().slice(0, 23).replace("T", " ")} UTC`;
  return here ? `${utc} (${clockOf(local(ms), true)} ${here})` : utc;
}

/** Value of a datetime-local input that shows UTC, and back. */
export const toInput = (ms) => new Date(ms).toISOString().slice(0, 19);
export const fromInput = (text) => Date.parse(`${text}Z`);
