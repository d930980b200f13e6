"""Plots over time as self-contained SVG. Colours are CSS variables of the page; values show on hover. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 560.0, 200.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 10.0, 14.0, 24.0
_HOURS = (
    1 / 3600,
    1 / 720,
    1 / 360,
    1 / 120,
    1 / 60,
    1 / 30,
    1 / 12,
    1 / 6,
    1 / 4,
    1 / 2,
    1,
    2,
    3,
    6,
    12,
    24,
    48,
    72,
    168,
)
_TICKS_MOST = 7


class Line(NamedTuple):
    label: str
    colour: str
    """Name of a CSS variable of the page, without the dashes."""
    values: Sequence[float]
    """One value per bin; NaN: none; infinite: drawn at the top."""
    dashed: bool = False


@dataclass(frozen=True)
class Plot:
    title: str
    says: Callable[[float], str]
    """Formats a value."""
    bin_s: float
    end_s: float
    top: float
    """Largest value of the scale."""
    areas: Sequence[Line] = ()
    """Stacked areas."""
    lines: Sequence[Line] = ()
    least: float = 0.0
    """Smallest value of a logarithmic scale; 0: the scale is linear."""
    rule: float | None = None
    """Value of a horizontal line, for example an objective."""
    deaths_s: Sequence[float] = ()
    shaded_s: tuple[float, float] | None = None
    note: str = ""

    def svg(self) -> str:
        out = [f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(self.title)}">']
        if self.shaded_s is not None:
            x0, x1 = map(self._x, self.shaded_s)
            out.append(f'<rect class="shaded" {_box_attributes(x0, _TOP, x1, HEIGHT - _BOTTOM)}/>')
        out += self._axes()
        below = [0.0] * max((len(area.values) for area in self.areas), default=0)
        for area in self.areas:
            above = [low + value for low, value in zip(below, area.values, strict=True)]
            edge = self._step_path(above) + " " + self._step_path(below, back=True)
            out.append(f'<path class="area" style="fill:var(--{area.colour})" d="M{edge}Z"/>')
            below = above
        if self.rule is not None:
            y = self._y(self.rule)
            out.append(f'<path class="rule" d="M{_LEFT:g} {y:.1f}H{WIDTH - _RIGHT:g}"/>')
        for line in self.lines:
            out += self._line(line)
        for at_s in self.deaths_s:
            x = self._x(at_s)
            out.append(f'<path class="death" d="M{x:.1f} {HEIGHT - _BOTTOM:g}V{_TOP:g}"/>')
            out.append(f'<path class="cross" d="M{x - 3:.1f} {_TOP - 9:g}l6 6m0 -6l-6 6"/>')
        return "".join([*out, *self._hover_boxes(), "</svg>"])

    def _axes(self) -> list[str]:
        out = []
        for value in self._grid_values():
            y = self._y(value)
            out.append(f'<path class="grid" d="M{_LEFT:g} {y:.1f}H{WIDTH - _RIGHT:g}"/>')
            out.append(f'<text x="{_LEFT - 6:g}" y="{y + 3.5:.1f}" text-anchor="end">{escape(self.says(value))}</text>')
        every_s = next((h * 3600 for h in _HOURS if self.end_s / (h * 3600) <= _TICKS_MOST), _HOURS[-1] * 3600)
        for number in range(int(self.end_s // every_s) + 1):
            x = self._x(number * every_s)
            out.append(f'<path class="tick" d="M{x:.1f} {HEIGHT - _BOTTOM:g}v4"/>')
            anchor = "end" if x > WIDTH - _RIGHT - 12 else "middle"
            time = clock(number * every_s, seconds=every_s % 60 > 0)
            out.append(f'<text x="{x:.1f}" y="{HEIGHT - 6:g}" text-anchor="{anchor}">{time}</text>')
        return out

    def _grid_values(self) -> list[float]:
        """Values of the horizontal grid lines."""
        if self.least > 0:
            first, last = round(math.log10(self.least)), math.floor(math.log10(self.top) + 1e-9)
            between = (1, 2, 5) if self.top / self.least < 300 else (1,)
            found = [k * 10.0**power for power in range(first, last + 1) for k in between]
            return [value for value in found if value <= self.top]
        return round_levels(self.top)

    def _line(self, line: Line) -> list[str]:
        """SVG of one line; infinite values are drawn at the top, and missing ones leave a gap."""
        parts: list[str] = []
        begun = False
        for number, value in enumerate(line.values):
            if math.isnan(value) or math.isinf(value):
                begun = False
                continue
            x0, x1, y = self._x(number * self.bin_s), self._x((number + 1) * self.bin_s), self._y(value)
            parts.append(f"{'L' if begun else 'M'}{x0:.1f} {y:.1f}H{x1:.1f}")
            begun = True
        dashes = ";stroke-dasharray:5 3" if line.dashed else ""
        out = (
            [f'<path class="line" style="stroke:var(--{line.colour}){dashes}" d="{"".join(parts)}"/>'] if parts else []
        )
        over = [number for number, value in enumerate(line.values) if math.isinf(value)]
        if over:
            marks = "".join(
                f"M{self._x(n * self.bin_s):.1f} {_TOP:g}H{self._x((n + 1) * self.bin_s):.1f}" for n in over
            )
            out.append(f'<path class="over" style="stroke:var(--{line.colour})" d="{marks}"/>')
        return out

    def _hover_boxes(self) -> list[str]:
        """Invisible boxes whose titles show the values of each bin."""
        shown = [*self.areas, *self.lines]
        out = []
        for number in range(max((len(line.values) for line in shown), default=0)):
            says = [clock(number * self.bin_s, seconds=self.bin_s % 60 > 0)]
            for line in shown:
                value = line.values[number] if number < len(line.values) else math.nan
                text = "none" if math.isnan(value) else "not served" if math.isinf(value) else self.says(value)
                says.append(f"{line.label}: {text}")
            x0, x1 = self._x(number * self.bin_s), self._x((number + 1) * self.bin_s)
            box = _box_attributes(x0, _TOP, x1, HEIGHT - _BOTTOM)
            out.append(f'<rect class="hover" {box}><title>{escape(chr(10).join(says))}</title></rect>')
        return out

    def _step_path(self, values: Sequence[float], *, back: bool = False) -> str:
        """SVG points of a step function over the bins. ``back``: from right to left."""
        points = []
        for number, value in enumerate(values):
            y = self._y(value)
            points += [
                f"{self._x(number * self.bin_s):.1f} {y:.1f}", f"{self._x((number + 1) * self.bin_s):.1f} {y:.1f}"
            ]  # fmt: skip
        return ("L" if back else "") + "L".join(reversed(points) if back else points)

    def _x(self, at_s: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * min(at_s / self.end_s, 1.0)

    def _y(self, value: float) -> float:
        if self.least > 0:
            share = math.log(max(value, self.least) / self.least) / math.log(self.top / self.least)
        else:
            share = value / self.top
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * min(max(share, 0.0), 1.0)


def round_levels(top: float) -> list[float]:
    """Three to six round values from 0 to ``top``."""
    power = 10.0 ** math.floor(math.log10(top / 5))
    step = next(power * k for k in (1, 2, 5, 10) if top / (power * k) <= 5)
    return [step * number for number in range(int(top / step + 1e-9) + 1)]


def clock(at_s: float, *, seconds: bool = False) -> str:
    """Format a time since the start as hours and minutes. ``seconds``: with seconds also where they are 0."""
    hours, rest_s = divmod(round(at_s), 3600)
    minutes, left_s = divmod(rest_s, 60)
    return f"{hours}:{minutes:02}" + (f":{left_s:02}" if seconds or left_s else "")


def _box_attributes(x0: float, y0: float, x1: float, y1: float) -> str:
    return f'x="{x0:.1f}" y="{y0:g}" width="{max(x1 - x0, 0.1):.1f}" height="{y1 - y0:g}"'
