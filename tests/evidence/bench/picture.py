"""A bench as a picture: peak against step time, a line per method, budgets as vertical lines. Plain SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from autockpt.analysis.draw import Axis
from autockpt.schema import format_binary, words
from tests.evidence.bench.report import BenchLine, BenchReport

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 76, 236, 40, 56
# ours first; then colours that are told apart by people who do not see red and green alike (Okabe & Ito 2008)
OURS = "#d55e00"
COLOURS = ("#000000", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6d31", "#7f7f7f")
FILLED = ("circle", "square", "diamond", "triangle")


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


def bench_picture(report: BenchReport) -> str:
    """The SVG document. Rows without a time are left out; compiled methods are drawn dashed."""
    lines = [line for line in report.lines if line.step_seconds is not None and line.row.peak_bytes is not None]
    if not lines:
        return _document([_text(WIDTH / 2, HEIGHT / 2, "nothing was timed yet", anchor="middle")])
    x = Axis([float(line.row.peak_bytes or 0) for line in lines], LEFT, WIDTH - RIGHT)
    y = Axis([float(line.step_seconds or 0) for line in lines], HEIGHT - BOTTOM, TOP)
    parts = [*_frame(x, y), *_budgets(report, x)]
    for number, (peer, members) in enumerate(_by_peer(lines)):
        parts += _method(peer, members, number, x, y)
    title = f"{report.model} on {report.environment.device.name}: peak against step time"
    return _document([_text(LEFT, 22, title, size=14, bold=True), *parts])


def _by_peer(lines: Iterable[BenchLine]) -> list[tuple[str, list[BenchLine]]]:
    """Rows of each method by peak, in the order of the report."""
    found: dict[str, list[BenchLine]] = {}
    for line in lines:
        found.setdefault(line.row.peer, []).append(line)
    return [(p, sorted(members, key=lambda m: m.row.peak_bytes or 0)) for p, members in found.items()]


def _frame(x: Axis, y: Axis) -> list[str]:
    parts = []
    for value in x.ticks(x.binary_unit):
        parts.append(_line(x(value), y.start, x(value), y.end, "#eeeeee"))
        parts.append(_text(x(value), y.start + 18, format_binary(value), anchor="middle"))
    for value in y.ticks():
        parts.append(_line(x.start, y(value), x.end, y(value), "#eeeeee"))
        parts.append(_text(x.start - 8, y(value) + 4, words.seconds(value), anchor="end"))
    parts.append(_line(x.start, y.start, x.end, y.start, "#444444"))
    parts.append(_line(x.start, y.start, x.start, y.end, "#444444"))
    parts.append(_text((x.start + x.end) / 2, HEIGHT - 14, "measured peak of a whole step", anchor="middle"))
    parts.append(_text(12, TOP - 6, "step time", anchor="start"))
    return parts


def _budgets(report: BenchReport, x: Axis) -> list[str]:
    parts = []
    for result in report.budgets:
        size = result.budget.bytes
        if x.inside(size):
            parts.append(_line(x(size), HEIGHT - BOTTOM, x(size), TOP, "#999999", dash="2 4"))
            parts.append(_text(x(size) - 4, TOP + 12, result.budget.asked, anchor="end", colour="#666666"))
    return parts


def _method(peer: str, members: Sequence[BenchLine], number: int, x: Axis, y: Axis) -> list[str]:
    ours = any(line.row.budget for line in members)
    colour = OURS if ours else COLOURS[number % len(COLOURS)]
    kind = FILLED[number % len(FILLED)]
    compiled = members[0].row.group == "compiled"
    points = [(x(line.row.peak_bytes or 0), y(line.step_seconds or 0)) for line in members]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    style = f'stroke="{colour}" stroke-width="{2.4 if ours else 1.3}"{_dash("5 3" if compiled else "")}'
    parts = [f'<polyline points="{path}" fill="none" {style}/>'] if len(points) > 1 else []
    for line, (px, py) in zip(members, points, strict=True):
        if line.noise is not None and line.noise < words.USELESS_NOISE:
            ends = [y.clipped((line.step_seconds or 0) * (1 + side * line.noise)) for side in (-1, 1)]
            parts.append(_line(px, y(ends[0]), px, y(ends[1]), colour))
        peak, step = format_binary(line.row.peak_bytes or 0), words.seconds(line.step_seconds or 0)
        parts.append(_mark(kind, px, py, colour, f"{line.row.key}: {peak}, {step}", 5 if ours else 4))
    row = TOP + 10 + 22 * number
    column = WIDTH - RIGHT + 26
    parts.append(_mark(kind, column, row - 4, colour, peer, 5 if ours else 4))
    parts.append(_text(column + 12, row, peer + (" (compiled)" if compiled else ""), bold=ours))
    return parts


def _mark(kind: str, x: float, y: float, colour: str, title: str, r: float) -> str:
    drawn = mark(kind, r, f'fill="{colour}"', title)
    return f'<g transform="translate({x:.1f} {y:.1f})">{drawn}</g>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{_dash(dash)}/>'


def _dash(pattern: str) -> str:
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, bold: bool = False, colour: str = "#222222"
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}"{weight}>{escape(text)}</text>'


def _document(parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"
