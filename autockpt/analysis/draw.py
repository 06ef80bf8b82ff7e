"""The drawings of a page, as SVG whose coordinates are percentages, so that they fit any width.

A curve lies in an inner drawing of 100 × 100 units that is stretched; everything else is placed in per cent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from autockpt.analysis.explanation import Curve
from autockpt.schema import format_binary, words
from autockpt.schema.run_directory import undominated


class Axis:
    """Round values over a range with some air, and where on the page they lie."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        air = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
        self.low, self.high = max(0.0, low - air), high + air
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def clipped(self, value: float) -> float:
        return min(max(value, self.low), self.high)

    @property
    def binary_unit(self) -> float:
        """The power of 1024 that bytes of the range are written in."""
        return 2.0 ** (10 * int(math.log2(max(self.high, 1.0)) // 10))

    def ticks(self, unit: float = 1.0, count: int = 6) -> list[float]:
        """Round numbers of ``unit`` within the range."""
        rough = (self.high - self.low) / unit / count
        power = 10 ** math.floor(math.log10(rough))
        step = unit * next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step) + 1)]


@dataclass(frozen=True)
class PlotPoint:
    """A plan by its peak and step time; ``noise`` is half its interval as a share of the seconds."""

    peak_bytes: int
    seconds: float
    title: str
    style: str
    fits: bool = True
    noise: float = 0.0
    radius: float = 4.5


def plane(points: Sequence[PlotPoint], budget_bytes: int | None) -> Markup:
    """Peak against step time, with the Pareto front and the budget; nothing for no points."""
    if not points:
        return Markup("")
    budget = [float(budget_bytes)] if budget_bytes is not None else []
    x = Axis([*(float(point.peak_bytes) for point in points), *budget], 0, 100)
    y = Axis([point.seconds for point in points], 100, 0)
    parts = [part for value in y.ticks(count=5) for part in _row(y(value), words.seconds(value))]
    for value in x.ticks(x.binary_unit, 4):
        at = f"{x(value):.2f}%"
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="0%" y2="100%"/>')
        parts.append(_text(at, format_binary(value)))
    parts.append('<text class="name" x="100%" y="100%" dy="36" text-anchor="end">peak of a whole step</text>')
    parts.append('<text class="name" x="0%" y="0%" dy="-8" dx="-60">step time</text>')
    first, *rest = undominated(points, lambda point: (point.peak_bytes, point.seconds))
    steps = "".join(f"H{x(point.peak_bytes):.2f}V{y(point.seconds):.2f}" for point in rest)
    start = f"M{x(first.peak_bytes):.2f} {y(first.seconds):.2f}"
    parts.append(_stretched(f'<path class="front" d="{start}{steps}H100"/>'))
    for point in points:
        at = f"{x(point.peak_bytes):.2f}%"
        top, bottom = (y(y.clipped(point.seconds * (1 + side * point.noise))) for side in (1, -1))
        ends = f'x1="{at}" x2="{at}" y1="{top:.2f}%" y2="{bottom:.2f}%"'
        parts.append(f'<line class="interval {point.style}" {ends}/>')
        kind = f"mark {point.style}{'' if point.fits else ' run1'}"
        drawn = f'<circle r="{point.radius}" class="{kind}"><title>{escape(point.title)}</title></circle>'
        parts.append(f'<svg x="{at}" y="{y(point.seconds):.2f}%" class="at">{drawn}</svg>')
    parts += [f'<line class="budget" x1="{x(v):.2f}%" x2="{x(v):.2f}%" y1="0%" y2="100%"/>' for v in budget]
    return _svg(parts, "plane", "Peak memory against step time of every plan")


def curves(drawn: Mapping[str, Curve], budget_bytes: int | None) -> Markup:
    """Bytes through the step of each plan, overlaid op by op; names are those of ``.curve`` in the style."""
    longest = max(curve.ops for curve in drawn.values())
    top = max(max(curve.total) for curve in drawn.values())
    near = budget_bytes is not None and budget_bytes < 1.5 * top
    y = Axis([0.0, float(max(top, budget_bytes or 0) if near else top)], 100, 0)
    parts = [part for value in y.ticks(y.binary_unit, 5) for part in _row(y(value), format_binary(value))]
    *_, last = drawn.values()
    for span in last.spans:
        if span.stop - span.start > 0.12 * longest:
            parts.append(_text(f"{50 * (span.start + span.stop) / longest:.2f}%", span.phase))
    for name, curve in reversed(list(drawn.items())):
        width = 100 * curve.ops / longest / len(curve.total)
        points = " ".join(f"{i * width:.2f},{y(size):.2f}" for i, size in enumerate(curve.total))
        end = f"{len(curve.total) * width:.2f},{y(0):.2f}"
        closed = f'<polygon class="area {name}" points="0,{y(0):.2f} {points} {end}"/>'
        parts.append(_stretched(f'{closed}<polyline class="curve {name}" points="{points}"/>'))
    if near and budget_bytes is not None:
        at = y(budget_bytes)
        parts.append(f'<line class="budget" x1="0%" x2="100%" y1="{at:.2f}%" y2="{at:.2f}%"/>')
        parts.append(f'<text class="tick" x="100%" y="{at:.2f}%" dy="-5" text-anchor="end">budget</text>')
    return _svg(parts, "steps", "Bytes on the device through the step")


def _text(at: str, text: str) -> str:
    return f'<text class="tick" x="{at}" y="100%" dy="18" text-anchor="middle">{escape(text)}</text>'


def _row(at: float, text: str) -> list[str]:
    return [
        f'<line class="grid" x1="0%" x2="100%" y1="{at:.2f}%" y2="{at:.2f}%"/>',
        f'<text class="tick" x="0%" y="{at:.2f}%" dx="-8" dy="4" text-anchor="end">{escape(text)}</text>',
    ]


def _stretched(inner: str) -> str:
    return f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" width="100%" height="100%">{inner}</svg>'


def _svg(parts: Iterable[str], name: str, label: str) -> Markup:
    head = f'<svg class="plot" id="{name}" role="img" aria-label="{escape(label)}">'
    return Markup("".join([head, *parts, "</svg>"]))
