// A line of each replica's last minutes: load, KV cache or engine queue.

const SVG = "http://www.w3.org/2000/svg";
const KEPT_MS = 300_000; // as long as a gateway keeps samples
const EVERY_MS = 10_000; // interval of `recent`
const APART_MS = 4_000; // samples of this page, of which snapshots every 2 s would be too many
const GAP_MS = 25_000;
const WIDTH = 100;
const HEIGHT = 24;

/** Samples by replica. The gateway's samples of the time before come with the first snapshot that has the replica. */
export class Samples {
  constructor() {
    this.byReplica = new Map();
  }

  add({ at_ms: at, fleet, fabric }) {
    if (!fleet || fabric.state !== "ok") return;
    const seen = new Set();
    for (const pool of fleet.pools) {
      for (const row of pool.replicas) {
        seen.add(row.replica);
        const samples = this.byReplica.get(row.replica) ?? this.begin(row, at);
        if (samples.length && at - samples.at(-1).at < APART_MS) continue;
        samples.push({ at, load: row.slots ? (row.running + row.waiting) / row.slots : null, kv: row.kv_used, queue: row.waiting });
        while (at - samples[0].at > KEPT_MS) samples.shift();
      }
    }
    for (const replica of this.byReplica.keys()) if (!seen.has(replica)) this.byReplica.delete(replica);
  }

  begin({ replica, recent = [] }, at) {
    const samples = recent.map(([load, kv, queue], index) => ({ at: at - (recent.length - index) * EVERY_MS, load: load / 100, kv: kv === null ? null : kv / 100, queue }));
    this.byReplica.set(replica, samples);
    return samples;
  }

  /** `[[ms, value], …]` of a figure, the oldest first. */
  of(replica, figure) {
    const found = this.byReplica.get(replica) ?? [];
    return found.filter((sample) => sample[figure] !== null && sample[figure] !== undefined).map((sample) => [sample.at, sample[figure]]);
  }
}

const point = ([at, value], until, most) => {
  const x = WIDTH * (1 - (until - at) / KEPT_MS);
  return `${Math.max(x, 0).toFixed(1)} ${(HEIGHT - 1 - (HEIGHT - 2) * Math.min(value / most, 1)).toFixed(1)}`;
};

/** The line of `points`; `most`: the value at the top; `label`: what it says in words. */
export function sparkline({ points, most, until, label, isHigh }) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  svg.setAttribute("class", isHigh ? "spark high" : "spark");
  let line = "";
  let area = "";
  points.forEach((each, index) => {
    const isNew = !index || each[0] - points[index - 1][0] > GAP_MS;
    const at = point(each, until, most);
    const x = at.split(" ")[0];
    if (isNew && index) area += `L${point(points[index - 1], until, most).split(" ")[0]} ${HEIGHT}Z`;
    line += isNew ? `M${at}h0.01` : `L${at}`;
    area += isNew ? `M${x} ${HEIGHT}L${at}` : `L${at}`;
  });
  if (points.length) area += `L${point(points.at(-1), until, most).split(" ")[0]} ${HEIGHT}Z`;
  for (const [name, d] of [["area", area], ["stroke", line]]) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", d);
    path.setAttribute("class", name);
    svg.append(path);
  }
  return svg;
}
