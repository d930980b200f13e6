// The bar of time range and filters, and what the sources of the figures can serve.

import { $, copyText, el } from "./dom.js";
import { isFiltered, pinned, RANGES, serialize, SPARKS, SORTS, STATUSES } from "./ops-state.js";
import { both, bothOfRange, fromInput, toInput, zone } from "./ops-time.js";

const OFF = "Only live figures: this gateway has no telemetry. To query past requests, set STREAM_GW_TELEMETRY_URL.";
const HOUR_MS = 3_600_000;
const COPIED_MS = 1500;
const TYPED_MS = 500;

const option = (value, text) => {
  const made = el("option", "", text);
  made.value = value;
  return made;
};

export class Filters {
  /** `onChange(changes)`: fields of the state that somebody changed. */
  constructor({ onChange, announce }) {
    this.onChange = onChange;
    this.announce = announce;
    this.coverage = null;
    this.telemetry = null;
    this.ranges = new Map(RANGES.map(([key, label]) => [key, this.rangeButton(key, label)]));
    $("ranges").append(...this.ranges.values());
    $("status").append(option("", "Any"), ...STATUSES.map((status) => option(status, status)));
    $("sort").append(...SORTS.map(([key, title]) => option(key, title)));
    $("spark").append(...SPARKS.map(([key, title]) => option(key, title)));
    for (const name of ["status", "sort", "spark"]) $(name).addEventListener("change", () => onChange({ [name]: $(name).value }));
    for (const name of ["tenant", "model"]) this.field(name);
    $("filters").addEventListener("submit", (event) => event.preventDefault());
    $("clear").addEventListener("click", () => onChange({ tenant: "", model: "", status: "" }));
    $("link").addEventListener("click", () => this.copyLink());
    $("custom").addEventListener("submit", (event) => this.apply(event));
    for (const name of ["from", "to"]) $(name).addEventListener("input", () => this.showLocal());
  }

  rangeButton(key, label) {
    const button = el("button", "", label);
    button.type = "button";
    button.addEventListener("click", () => {
      if (key === "custom") this.openCustom();
      else this.onChange({ range: key, from: 0, to: 0 });
    });
    return button;
  }

  field(name) {
    const input = $(name);
    const take = () => {
      clearTimeout(this[name]);
      if (input.value.trim() !== this.state[name]) this.onChange({ [name]: input.value.trim() });
    };
    input.addEventListener("input", () => {
      clearTimeout(this[name]);
      this[name] = setTimeout(take, TYPED_MS);
    });
    input.addEventListener("change", take);
  }

  openCustom() {
    const { range, from, to } = this.state;
    const now = Math.floor(Date.now() / 1000) * 1000;
    const [, , recent] = RANGES.find(([key]) => key === range);
    $("from").value = toInput(from || now - (recent ? recent * 1000 : HOUR_MS));
    $("to").value = toInput(to || now);
    $("custom").hidden = false;
    this.showLocal();
    $("from").focus();
  }

  apply(event) {
    event.preventDefault();
    const [from, to] = ["from", "to"].map((name) => fromInput($(name).value));
    if (!(from < to)) {
      $("custom-error").textContent = "The range must begin before it ends.";
      return;
    }
    this.onChange({ range: "custom", from, to });
  }

  showLocal() {
    $("custom-error").textContent = "";
    const [from, to] = ["from", "to"].map((name) => fromInput($(name).value));
    $("custom-local").textContent = from && to && zone(from) ? bothOfRange(from, to) : "";
  }

  async copyLink() {
    const address = `${location.origin}${location.pathname}${serialize(pinned(this.state, Date.now()))}${location.hash}`;
    const isCopied = await copyText(address);
    $("link").textContent = isCopied ? "Copied" : "Copying is not allowed";
    this.announce(isCopied ? "The link is copied. It shows this time range." : "Copying is not allowed.");
    setTimeout(() => {
      $("link").textContent = "Copy link";
    }, COPIED_MS);
  }

  /** Shows a state, and why parts of it cannot be chosen. */
  show(state) {
    this.state = state;
    const isOff = this.telemetry?.state === "off";
    for (const [key, button] of this.ranges) {
      button.setAttribute("aria-pressed", String(key === (isOff ? "live" : state.range)));
      button.disabled = isOff && key !== "live";
      button.title = button.disabled ? OFF : "";
    }
    $("custom").hidden = isOff || state.range !== "custom";
    if (state.range === "custom") {
      $("from").value = toInput(state.from);
      $("to").value = toInput(state.to);
      this.showLocal();
    }
    for (const name of ["tenant", "model", "status", "sort", "spark"]) {
      if (document.activeElement !== $(name) || !$(name).value) $(name).value = state[name];
      $(name).closest("label").classList.toggle("set", name !== "sort" && name !== "spark" && Boolean(state[name]));
    }
    $("tenant").disabled = $("status").disabled = $("sort").disabled = isOff;
    $("clear").hidden = !isFiltered(state);
    $("range-note").textContent = this.said(state, isOff);
    $("range-note").classList.toggle("bad", this.isBefore(state));
  }

  /** What the sources can serve: once a snapshot or telemetry's coverage is known. */
  know(telemetry, coverage = this.coverage) {
    const isNews = telemetry.state !== this.telemetry?.state || coverage !== this.coverage;
    Object.assign(this, { telemetry, coverage });
    if (isNews) this.show(this.state);
  }

  oldest(state) {
    return (state.tenant ? this.coverage?.oldest_us : this.coverage?.rollups_oldest_us) / 1000;
  }

  isBefore(state) {
    return Boolean(this.coverage?.requests) && state.range === "custom" && state.to <= this.oldest(state);
  }

  said(state, isOff) {
    if (isOff) return OFF;
    if (this.telemetry?.state === "away") return "Telemetry does not answer: only the live figures are current.";
    const live = state.range === "live" ? "Replicas and queues every 2 s; requests of the last 15 minutes from telemetry. " : "Pools and replicas below are live. ";
    if (!this.coverage) return live;
    if (!this.coverage.requests) return `${live}Telemetry has no request yet.`;
    const [oldest, rollups] = [this.coverage.oldest_us / 1000, this.coverage.rollups_oldest_us / 1000];
    const charts = rollups < oldest - HOUR_MS ? `, figures by minute since ${both(rollups, { hasSeconds: false })}` : "";
    const since = `Telemetry has requests since ${both(oldest, { hasSeconds: false })}${charts}.`;
    if (this.isBefore(state)) return `Telemetry has nothing of this range. ${since}`;
    return `${live}${since}${state.tenant || state.status ? " Pools and replicas are not filtered by tenant or status." : ""}`;
  }

  /** Proposes the tenants and models of the range. */
  propose(rows, models) {
    const list = (name, values) => $(name).replaceChildren(...[...new Set(values)].map((value) => option(value, "")));
    list("tenants", rows.map(({ tenant }) => tenant).filter(Boolean));
    list("models", [...rows.map(({ model }) => model).filter(Boolean), ...models]);
  }
}
