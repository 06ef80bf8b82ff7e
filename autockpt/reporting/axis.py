"""What drawings share: a range of values on a line, the round numbers to write along it, and marks of points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

MARKS = ("circle", "square", "diamond", "triangle", "cross")


def mark(kind: str, r: float, attributes: str, title: str) -> str:
    """A mark around the origin as SVG, ``r`` from its middle to its edge."""
    shapes = {
        "circle": f'<circle r="{r}"',
        "square": f'<rect x="{-r}" y="{-r}" width="{2 * r}" height="{2 * r}"',
        "diamond": f'<path d="M0 {-r - 1}L{r + 1} 0L0 {r + 1}L{-r - 1} 0Z"',
        "triangle": f'<path d="M0 {-r - 1}L{r + 1} {r}L{-r - 1} {r}Z"',
        "cross": f'<path d="M{-r} {-r}L{r} {r}M{-r} {r}L{r} {-r}" stroke-width="2.5"',
    }
    tag = shapes[kind].split()[0][1:]
    return f"{shapes[kind]} {attributes}><title>{escape(title)}</title></{tag}>"


class Axis:
    """Round values over a range with some air, and where on the page they lie."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        air = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
        self.low, self.high = max(0.0, low - air), high + air
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def inside(self, value: float) -> bool:
        return self.low <= value <= self.high

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
