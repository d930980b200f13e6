"""The plot of ``bench.surge``: per second what clients were told, and the replicas that were wanted and ready."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape

from bench.surge_report import Run, Try, kind_of

WIDTH, LEFT, RIGHT, TOP = 980, 62, 62, 132
HIGH, GAP, LOW = 300, 34, 90
"""Heights of the counts, the space below them, and of ``Retry-After``."""
INK, GRID, PALE = "#1b1f24", "#e3e7eb", "#57606a"
COLOURS = {
    "in time": ("#1a7f37", "first token within {:g} s"),
    "again": ("#7ee08f", "the same for a client that came again after its Retry-After"),
    "queued": ("#54aeff", "a place in the queue, then the first token within {:g} s"),
    "late": ("#bf8700", "first token after more than {:g} s"),
    "refused": ("#ffb3ab", "refused, with Retry-After"),
    "refused again": ("#e5534b", "came again and was refused again"),
    "failed": ("#1b1f24", "failed"),
}
LINES = {"wanted": ("#8250df", "6 4"), "ready": ("#0b1f4b", ""), "warm": ("#cf222e", "2 3")}


class Axis:
    """Places of moments and numbers on the plot."""

    def __init__(self, from_s: float, to_s: float, most: float, replicas: int) -> None:
        self.from_s, self.to_s, self.most, self.replicas = from_s, to_s, most, replicas
        self.right = WIDTH - RIGHT
        self.bottom = TOP + HIGH

    def x(self, at_s: float) -> float:
        at_s = min(max(at_s, self.from_s), self.to_s)
        return LEFT + (self.right - LEFT) * (at_s - self.from_s) / (self.to_s - self.from_s)

    def y(self, count: float) -> float:
        return self.bottom - HIGH * count / self.most

    def y_replicas(self, count: float) -> float:
        return self.bottom - HIGH * count / self.replicas

    def y_after(self, seconds: float) -> float:
        return self.bottom + GAP + LOW * (1 - seconds / 60)


def text(x: float, y: float, what: str, anchor: str = "start", colour: str = INK, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{more}>{escape(what)}</text>'


def line(points: Sequence[tuple[float, float]], colour: str, width: float, dashes: str = "") -> str:
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashed}/>'


def stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A line that keeps its value until the next point."""
    found = [points[0]]
    for x, y in points[1:]:
        found += [(x, found[-1][1]), (x, y)]
    return found


def stacks(axis: Axis, told: dict[str, Counter[int]]) -> Iterator[str]:
    """One area for each kind, on top of those before it."""
    seconds = range(math.floor(axis.from_s), math.ceil(axis.to_s))
    below = dict.fromkeys(seconds, 0)
    for kind, counts in told.items():
        above = {second: below[second] + counts[second] for second in seconds}
        edges = [[(axis.x(s + end), axis.y(level[s])) for s in seconds for end in (0, 1)] for level in (above, below)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in [*edges[0], *reversed(edges[1])])
        if any(counts.values()):
            yield f'<path d="{path}Z" fill="{COLOURS[kind][0]}" shape-rendering="crispEdges"/>'
        below = above


def frame(axis: Axis, step_s: float) -> Iterator[str]:
    """Axes with their numbers, and the step's limits."""
    every = 20 if axis.most > 80 else 10 if axis.most > 30 else 5
    for count in range(0, int(axis.most) + 1, every):
        yield line([(LEFT, axis.y(count)), (axis.right, axis.y(count))], GRID, 1)
        yield text(LEFT - 8, axis.y(count) + 4, str(count), "end")
    for count in range(0, axis.replicas + 1, 2 if axis.replicas > 8 else 1):
        yield text(axis.right + 8, axis.y_replicas(count) + 4, str(count))
    for seconds in (0, 30, 60):
        yield line([(LEFT, axis.y_after(seconds)), (axis.right, axis.y_after(seconds))], GRID, 1)
        yield text(LEFT - 8, axis.y_after(seconds) + 4, str(seconds), "end")
    foot = axis.y_after(0)
    for at_s in range(math.ceil(axis.from_s / 30) * 30, int(axis.to_s) + 1, 30):
        yield line([(axis.x(at_s), foot), (axis.x(at_s), foot + 4)], INK, 1)
        yield text(axis.x(at_s), foot + 18, str(at_s), "middle")
    yield text((LEFT + axis.right) / 2, foot + 38, "seconds from the first of the step", "middle")
    for at_s, what in ((0.0, "five times the requests"), (step_s, "the old load again")):
        yield line([(axis.x(at_s), TOP - 6), (axis.x(at_s), foot)], PALE, 1, "3 3")
        yield text(axis.x(at_s) + 4, TOP - 10, what, colour=PALE)
    middle = f"{TOP + HIGH / 2:.0f}"
    turned = f' transform="rotate(-90 16 {middle})"'
    yield text(16, float(middle), "answers per second", "middle", more=turned)
    turned = f' transform="rotate(90 {WIDTH - 14} {middle})"'
    yield text(WIDTH - 14, float(middle), "replicas", "middle", more=turned)
    turned = f' transform="rotate(-90 16 {axis.y_after(30):.0f})"'
    yield text(16, axis.y_after(30), "Retry-After, s", "middle", more=turned)


def legend(run: Run, shown: Sequence[str], lines: Sequence[str]) -> Iterator[str]:
    x, y = LEFT, 44
    for kind in shown:
        colour, what = COLOURS[kind]
        label = what.format(run.objective_s)
        if x + 18 + 7 * len(label) > WIDTH - RIGHT:
            x, y = LEFT, y + 20
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
        yield text(x + 18, y, label)
        x += 40 + 7 * len(label)
    x, y = LEFT, y + 20
    for name in lines:
        colour, dashes = LINES[name]
        yield line([(x, y - 4), (x + 26, y - 4)], colour, 2.5, dashes)
        yield text(x + 32, y, f"replicas {name}")
        x += 150


def retry_afters(axis: Axis, refused: Sequence[Try]) -> Iterator[str]:
    """Range of what the refused of each second were told, and its middle."""
    by_second: dict[int, list[int]] = {}
    for one in refused:
        by_second.setdefault(math.floor(one.told_s), []).append(one.retry_after_s)
    ranges, middles = [], []
    for second, told in sorted(by_second.items()):
        x, ordered = axis.x(second + 0.5), sorted(told)
        ranges.append(f"M{x:.1f} {axis.y_after(ordered[0]) + 1:.1f}V{axis.y_after(ordered[-1]) - 1:.1f}")
        middles.append(f"M{x:.1f} {axis.y_after(ordered[len(ordered) // 2]) + 1:.1f}v-2")
    if ranges:
        yield f'<path d="{"".join(ranges)}" stroke="#ffb3ab" stroke-width="1.4"/>'
        yield f'<path d="{"".join(middles)}" stroke="#a40e26" stroke-width="1.6"/>'


def draw(run: Run) -> str:
    from_s, step_s = -min(run.fact("before"), 60.0), run.fact("step")
    to_s = step_s + run.fact("after")
    told = {kind: Counter[int]() for kind in COLOURS}
    for one in run.tries:
        if from_s <= one.told_s < to_s:
            told[kind_of(one, run.objective_s)][math.floor(one.told_s)] += 1
    seconds = range(math.floor(from_s), math.ceil(to_s))
    most = max(sum(counts[second] for counts in told.values()) for second in seconds)
    seen = [one for one in run.seconds if from_s - 1 <= one.at_s <= to_s]
    replicas = max(max(one.wanted, one.ready) for one in seen)
    axis = Axis(from_s, to_s, math.ceil((most + 1) / 5) * 5, math.ceil(replicas * 1.25 / 2) * 2)
    height = axis.y_after(0) + 50
    lines = [name for name in LINES if any(getattr(one, name) for one in seen)]
    shown = [kind for kind, counts in told.items() if counts.total()]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
        text(LEFT, 22, "What clients were told in each second, and the pool's replicas", more=' font-size="15"'),
        *legend(run, shown, lines),
        *frame(axis, step_s),
        *stacks(axis, told),
    ]
    for name in lines:
        colour, dashes = LINES[name]
        points = stairs([(axis.x(one.at_s), axis.y_replicas(getattr(one, name))) for one in seen])
        parts += [line(points, "#ffffff", 4), line(points, colour, 2.2, dashes)]
    parts += retry_afters(axis, [one for one in run.tries if one.told == "refused" and from_s <= one.told_s < to_s])
    return "\n".join([*parts, "</svg>", ""])
