// A line chart by time step. Its axis fits most of the steps; steps above it are marked, and each step can be opened.

import { el } from "./dom.js";
import { both, times } from "./ops-time.js";
import { Table } from "./ops-table.js";

const SVG = "http://www.w3.org/2000/svg";
const FIT_SHARE = 0.9;
const FIT_RATIO = 2;
const FIT_MIN = 8; // with fewer steps, a percentile says nothing
const HEIGHT = 100;
const LABELS_MAX = 3;

/** The next higher round number: 1, 2 or 5 times a power of ten. */
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((each) => each * power >= value * 0.999);
}

/** Top of the axis for the values of the highest line: twice their 90th percentile, if the largest one is above it. */
export function fitTop(values, isFull) {
  const sorted = [...values].sort((a, b) => a - b);
  const most = sorted.at(-1) || 1;
  const fit = FIT_RATIO * (sorted[Math.floor(FIT_SHARE * (sorted.length - 1))] ?? 0);
  return !isFull && sorted.length >= FIT_MIN && fit && most > fit ? round(fit) : round(most);
}

export class Chart {
  /**
   * `lines`: `{name, label, of(row)}`, of which the first is the highest; `format`: text of a value;
   * `onStep(row)`: opens a step; `onAxis()`: the other axis is wanted.
   */
  constructor(title, lines, format, { about = "", onStep, onAxis, exports }) {
    Object.assign(this, { title, lines, format, onStep });
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    this.axis = el("button", "axis");
    this.axis.type = "button";
    this.axis.addEventListener("click", onAxis);
    this.note = el("p", "line");
    this.y = el("div", "y");
    this.x = el("div", "x");
    this.marks = el("div", "marks");
    this.cursor = el("i", "cursor");
    this.plot = el("div", "plot", this.y, this.svg, this.marks, this.cursor);
    this.readout = el("p", "readout");
    const heading = el("h3", "", title);
    if (about) heading.title = about;
    const keys = el("span", "keys", ...lines.map(({ name, label }) => el("span", `key ${name}`, label)));
    const time = { title: "Step (UTC)", name: "name", of: (row) => ({ text: this.stepText(row), sub: this.stepLocal(row) }) };
    const columns = lines.map(({ label, of }) => ({ title: label, name: "number", of: (row) => (of(row) === null ? "–" : format(of(row))) }));
    this.table = new Table(`${title}: values by step`, [time, ...[...columns].reverse()], { onRow: (row) => onStep(row) });
    const more = el("details", "values", el("summary", "", "Values"), this.table.node);
    const foot = el("div", "foot", more, exports);
    this.figure = el("div", "chart", el("div", "legend", keys, this.axis), this.plot, this.x, this.readout);
    this.node = el("article", "", heading, this.note, this.figure, foot);
    this.foot = foot;
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.pointAt(null));
    this.plot.addEventListener("click", (event) => {
      const row = this.rowAt(event);
      if (row) onStep(row);
    });
  }

  stepText = (row) => times(row.at, { hasSeconds: false }).utc;

  stepLocal = (row) => times(row.at, { hasSeconds: false }).local;

  /** `rows`: with `at` in ms, one for each step that has data. `note`: a sentence in place of the chart. */
  show({ rows, fromS, untilS, stepS, isFull, note = "" }) {
    if (this.note.textContent !== note) this.note.textContent = note;
    const [highest] = this.lines;
    const shown = rows.filter((row) => highest.of(row) !== null && row.at >= fromS * 1000 && row.at < untilS * 1000);
    this.figure.hidden = this.foot.hidden = !shown.length;
    const seen = JSON.stringify([shown, fromS, untilS, stepS, isFull]);
    if (seen === this.seen) return;
    this.seen = seen;
    Object.assign(this, { rows: shown, fromS, untilS, stepS });
    this.pointAt(null);
    if (!shown.length) return;
    const values = shown.map(highest.of);
    const top = fitTop(values, isFull);
    const most = Math.max(...values);
    const above = shown.filter((row) => highest.of(row) > top);
    this.drawAxis(top, above.length, isFull, round(most) > fitTop(values, false));
    this.drawLines(top);
    this.drawMarks(above);
    const last = shown.at(-1);
    const said = [...this.lines].reverse().map(({ label, of }) => `${label} ${of(last) === null ? "none" : this.format(of(last))}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}, up to ${this.format(most)}. At ${both(last.at, { hasSeconds: false })}: ${said}.`);
    this.table.update([...shown].reverse().map((row) => [row.at, row]));
  }

  xOf(ms) {
    return (ms / 1000 - this.fromS) / (this.untilS - this.fromS);
  }

  /** The middle of a row's step, of which the last one may be cut off by the range. */
  middle(row) {
    return this.xOf(row.at + 500 * Math.min(this.stepS, this.untilS - row.at / 1000));
  }

  drawAxis(top, above, isFull, canFit) {
    this.y.replaceChildren(...[1, 0.5].map((share) => {
      const label = el("span", "", this.format(top * share));
      label.style.top = `${100 * (1 - share)}%`;
      return label;
    }));
    const steps = above === 1 ? "1 step" : `${above} steps`;
    this.axis.hidden = !canFit;
    this.axis.textContent = isFull ? "Fit axis to most steps" : `${steps} above the axis: show whole`;
    const wide = this.untilS - this.fromS;
    const at = Array.from({ length: LABELS_MAX }, (_, index) => (this.fromS + (wide * index) / (LABELS_MAX - 1)) * 1000);
    const minutes = at.map((ms) => Math.round(ms / 60_000) * 60_000);
    this.x.replaceChildren(...minutes.map((ms, index) => {
      // The day stands where it changes, the zone at both ends
      const { utc, local } = times(ms, { hasSeconds: false, now: minutes[index - 1] });
      const isInner = index > 0 && index < LABELS_MAX - 1;
      return el("span", "", el("span", "", isInner ? utc : `${utc} UTC`), el("span", "sub", isInner ? local.replace(/ GMT.*$/, "") : local));
    }));
  }

  drawLines(top) {
    this.svg.setAttribute("viewBox", `0 0 1000 ${HEIGHT}`);
    const grid = document.createElementNS(SVG, "path");
    grid.setAttribute("class", "grid");
    grid.setAttribute("d", `M0 0H1000M0 ${HEIGHT / 2}H1000`);
    const paths = this.lines.map(({ name, of }) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", name);
      let d = "";
      let before = null;
      const isZero = this.rows.every((row) => !of(row)); // a red line of no failures looks like some
      for (const row of this.rows) {
        if (of(row) === null || isZero) continue;
        const at = `${(1000 * this.middle(row)).toFixed(1)} ${(HEIGHT - HEIGHT * Math.min(of(row) / top, 1)).toFixed(2)}`;
        // A step without a request is a gap; a step between two gaps is a dot
        d += before !== null && row.at - before <= this.stepS * 1000 ? `L${at}` : `M${at}h0.01`;
        before = row.at;
      }
      path.setAttribute("d", d);
      return path;
    });
    this.svg.replaceChildren(grid, ...paths);
  }

  drawMarks(above) {
    const [highest] = this.lines;
    this.marks.replaceChildren(...above.map((row) => {
      const said = `${both(row.at, { hasSeconds: false })}: ${highest.label} ${this.format(highest.of(row))}, above the axis. Show its requests`;
      const mark = el("button", "mark", el("span", "sr", said));
      mark.type = "button";
      mark.title = said;
      mark.style.left = `${100 * this.middle(row)}%`;
      mark.addEventListener("click", (event) => {
        event.stopPropagation();
        this.onStep(row);
      });
      mark.addEventListener("focus", () => this.pointAt(row));
      return mark;
    }));
  }

  rowAt(event) {
    if (!this.rows?.length) return null;
    const box = this.plot.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    return this.rows.reduce((best, row) => (Math.abs(this.middle(row) - share) < Math.abs(this.middle(best) - share) ? row : best));
  }

  point(event) {
    this.pointAt(this.rowAt(event));
  }

  pointAt(row) {
    this.cursor.hidden = !row;
    if (!row) {
      this.readout.textContent = this.rows?.length ? "Select a step to see its requests." : "";
      return;
    }
    this.cursor.style.left = `${100 * this.middle(row)}%`;
    const values = [...this.lines].reverse().map(({ label, of }) => `${label} ${of(row) === null ? "–" : this.format(of(row))}`);
    this.readout.textContent = `${both(row.at, { hasSeconds: false, now: this.fromS * 1000 })}: ${values.join(", ")}`;
  }
}
