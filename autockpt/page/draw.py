"""Drawings of a page as SVG whose places are percentages: they fit any width with text of one size.

A curve lies in an inner drawing of 100 × 100 units that is stretched; everything else is placed in per cent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from markupsafe import Markup

from autockpt.page.contents import Contents
from autockpt.page.plans import GHOST, PHASES, PREDICTED, SIMULATED, PlanPoint
from autockpt.page.tape import Timeline
from autockpt.reporting.axis import MARKS, Axis, mark
from autockpt.schema import format_binary, words

SMALL = {SIMULATED: "known", GHOST: "ghost", PREDICTED: "predicted"}  # styles of plans that are no trials


def plane(contents: Contents) -> Markup:
    """Peak against step time: trials, baselines, Pareto staircase and budget."""
    plans = contents.plans
    shown = sorted((p for p in plans.points.values() if p.shown), key=lambda p: p.phase != "")
    if not shown:
        return Markup("")
    budget = [float(contents.budget.bytes)] if contents.budget is not None else []
    x = Axis([*(float(p.peak or 0) for p in shown), *budget], 0, 100)
    y = Axis([v for p in shown for v in _reach(p)], 100, 0)
    front = [plans.points[key] for key in plans.front if plans.points[key].shown]
    parts = [
        *_grid(x, y, "peak of a whole step", "step time"),
        _stairs([(x(p.peak or 0), y(p.seconds or 0)) for p in front]),
        *(_point(p, x, y, p.key == plans.best) for p in shown),
        *(_handle("budget", x(value), "Memory budget") for value in budget),
    ]
    axes = f'data-low="{x.low:.0f}" data-high="{x.high:.0f}"'
    return _svg(parts, "plane", "Peak memory against step time of every plan", extra=axes)


def _reach(point: PlanPoint) -> tuple[float, ...]:
    """Seconds that the drawing must hold; a wide interval is cut rather than all else squeezed."""
    seconds = point.seconds or 0.0
    ends = (max(point.low or seconds, seconds * 0.75), min(point.high or seconds, seconds * 1.25))
    return (seconds, *ends)


def _stairs(corners: Sequence[tuple[float, float]]) -> str:
    """A line that goes to the right and then down at each corner, and from the last one to the edge."""
    if not corners:
        return ""
    (px, py), *rest = corners
    steps = "".join(f"H{px:.2f}V{py:.2f}" for px, py in rest)
    return _stretched(f'<path class="front" d="M{px:.2f} {py:.2f}{steps}H100"/>')


def _point(point: PlanPoint, x: Axis, y: Axis, best: bool) -> str:
    px, py = x(point.peak or 0), y(point.seconds or 0)
    style = f"{'phase' + str(_phase(point)) if point.phase else SMALL[point.basis]} run0"
    title = f"{point.name}: {format_binary(point.peak or 0)}, {words.seconds(point.seconds or 0)}, {point.basis}"
    kind = MARKS[_phase(point)] if point.phase else "circle"
    size = 3 if not point.phase else 6 if best else 4.5
    drawn = _mark(kind, size, f"{style}{' best' if best else ''}", title)
    return _interval(point, px, y, style) + _at(px, py, drawn, f' data-plan="{escape(point.key)}"')


def _interval(point: PlanPoint, px: float, y: Axis, style: str) -> str:
    if point.low is None or point.high is None:
        return ""
    top, bottom = y(y.clipped(point.high)), y(y.clipped(point.low))
    return f'<line class="interval {style}" x1="{px:.2f}%" x2="{px:.2f}%" y1="{top:.2f}%" y2="{bottom:.2f}%"/>'


def _at(px: float, py: float, drawn: str, extra: str = "") -> str:
    return f'<svg x="{px:.2f}%" y="{py:.2f}%" class="at"{extra}>{drawn}</svg>'


def _phase(point: PlanPoint) -> int:
    return PHASES.index(point.phase) if point.phase in PHASES else len(PHASES) - 1


def legend_mark(phase: str) -> Markup:
    """The mark of a phase of the search, to stand in a line of text."""
    number = PHASES.index(phase)
    drawn = _mark(MARKS[number], 4.5, f"phase{number} run0", phase)
    return Markup(f'<svg class="legend" width="14" height="14"><svg x="7" y="7" class="at">{drawn}</svg></svg>')


def _mark(kind: str, r: float, style: str, title: str) -> str:
    return mark(kind, r, f'class="mark {style}"', title)


def steps(tapes: Sequence[Timeline], budget_bytes: int | None) -> Markup:
    """Bytes through the step of each tape, overlaid on one axis of time (of ops, where times are not known)."""
    if not tapes:
        return Markup("")
    lengths = [tape.seconds if tape.seconds is not None else float(max(tape.ops) + 1) for tape in tapes]
    longest = max(lengths)
    top = max(max(tape.total) for tape in tapes)
    near = budget_bytes is not None and budget_bytes < 1.5 * top
    y = Axis([0.0, float(max(top, budget_bytes or 0) if near else top)], 100, 0)
    parts = []
    for value in y.ticks(y.binary_unit, 5):
        parts += _row(y(value), format_binary(value))
    timed = tapes[0].seconds is not None
    x = Axis([0.0, longest], 0, 100)
    for value in (v for v in x.ticks(count=4) if v <= 0.97 * longest):
        said = words.seconds(value) if timed else f"{value:,.0f} ops"
        at = f"{100 * value / longest:.2f}%"
        parts.append(f'<text class="tick" x="{at}" y="100%" dy="18" text-anchor="middle">{said}</text>')
    for phase, begin, end in tapes[-1].phases:
        share = lengths[-1] / longest
        if (end - begin) * share > 0.12:
            at = f"{50 * (begin + end) * share:.2f}%"
            parts.append(f'<text class="tick" x="{at}" y="100%" dy="36" text-anchor="middle">{phase}</text>')
    for tape, length in reversed(list(zip(tapes, lengths, strict=True))):
        end = 100 * length / longest
        points = " ".join(f"{a * end:.2f},{y(b):.2f}" for a, b in zip(tape.at, tape.total, strict=True))
        slug = {"save everything": "none", "recompute all": "all"}.get(tape.name, "ours")
        closed = f'<polygon class="area {slug}" points="0,{y(0):.2f} {points} {end:.2f},{y(0):.2f}"/>'
        parts.append(_stretched(f'{closed}<polyline class="curve {slug}" points="{points}"/>'))
    if near and budget_bytes is not None:
        at = y(budget_bytes)
        parts.append(f'<line class="budget" x1="0%" x2="100%" y1="{at:.2f}%" y2="{at:.2f}%"/>')
        parts.append(f'<text class="tick" x="100%" y="{at:.2f}%" dy="-5" text-anchor="end">budget</text>')
    parts.append(_handle("moment", 50, "Moment of the step"))
    return _svg(parts, "steps", "Bytes on the device through the step", extra=f'data-longest="{longest}"')


def progress(contents: Contents) -> Markup:
    """Best step time so far against the search's wall time, and every trial where it ended."""
    tried = [p for p in contents.plans.points.values() if p.shown and p.phase]
    tried.sort(key=lambda p: p.elapsed)
    if not any(p.fits for p in tried) or max(p.elapsed for p in tried) <= 0:
        return Markup("")
    x = Axis([0.0, *(p.elapsed for p in tried)], 0, 100)
    y = Axis([p.seconds or 0.0 for p in tried], 100, 0)
    parts = _grid(x, y, "since the search began", "step time", said=words.seconds)
    corners, best = [], math.inf
    for point in (p for p in tried if p.fits):
        if (point.seconds or math.inf) < best:
            best = point.seconds or math.inf
            corners.append((x(point.elapsed), y(best)))
    parts.append(_stairs(corners))
    for point in tried:
        fits = {True: "fits", False: "does not fit", None: "not known whether it fits"}[point.fits]
        title = f"{point.name}: {words.seconds(point.seconds or 0)}, {fits}, after {words.seconds(point.elapsed)}"
        style = f"phase{_phase(point)} run{0 if point.fits else 1}"
        drawn = _mark(MARKS[_phase(point)], 4.5, style, title)
        parts.append(_at(x(point.elapsed), y(point.seconds or 0), drawn))
    return _svg(parts, "progress", "Best step time so far against time of the search")


def agreement(contents: Contents, what: str) -> Markup:
    """What was predicted against what was measured: ``peak`` or ``seconds``, with the diagonal."""
    pairs = []
    for point in contents.plans.points.values():
        said = point.predicted_peak if what == "peak" else point.predicted_seconds
        real = point.peak if what == "peak" else point.seconds
        if point.basis == "measured" and said and real:
            pairs.append((point, float(said), float(real)))
    if not pairs:
        return Markup("")
    values = [v for _, *both in pairs for v in both]
    x, y = Axis(values, 0, 100), Axis(values, 100, 0)
    said = format_binary if what == "peak" else words.seconds
    parts = _grid(x, y, "predicted", "measured", said=said, same=True)
    parts.append('<line class="diagonal" x1="0%" y1="100%" x2="100%" y2="0%"/>')
    for point, predicted, real in pairs:
        title = f"{point.name}: predicted {said(predicted)}, measured {said(real)}"
        style = f"phase{_phase(point)} run0"
        if what == "seconds":
            parts.append(_interval(point, x(predicted), y, style))
        parts.append(_at(x(predicted), y(real), _mark(MARKS[_phase(point)], 4.5, style, title)))
    name = "peak" if what == "peak" else "step time"
    return _svg(parts, f"agreement-{what}", f"Predicted against measured {name}", style="square")


def _grid(
    x: Axis, y: Axis, below: str, left: str, said: Callable[[float], str] = format_binary, same: bool = False
) -> list[str]:
    """Lines and labels; ``said`` writes a value of the lower axis, and with ``same`` of the left one, too."""
    parts = []
    for value in y.ticks(y.binary_unit if same and said is format_binary else 1.0, 5):
        parts += _row(y(value), said(value) if same else words.seconds(value))
    for value in x.ticks(x.binary_unit if said is format_binary else 1.0, 4):
        at = f"{x(value):.2f}%"
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="0%" y2="100%"/>')
        parts.append(f'<text class="tick" x="{at}" y="100%" dy="18" text-anchor="middle">{escape(said(value))}</text>')
    parts.append(f'<text class="name" x="100%" y="100%" dy="36" text-anchor="end">{escape(below)}</text>')
    parts.append(f'<text class="name" x="0%" y="0%" dy="-8" dx="-60">{escape(left)}</text>')
    return parts


def _row(at: float, text: str) -> list[str]:
    return [
        f'<line class="grid" x1="0%" x2="100%" y1="{at:.2f}%" y2="{at:.2f}%"/>',
        f'<text class="tick" x="0%" y="{at:.2f}%" dx="-8" dy="4" text-anchor="end">{escape(text)}</text>',
    ]


def _handle(name: str, at: float, label: str) -> str:
    """A vertical line that can be dragged and moved with the arrow keys: the page's script does it."""
    return (
        f'<svg x="{at:.2f}%" y="0%" height="100%" class="at handle" id="{name}-handle" role="slider" tabindex="0" '
        f'aria-label="{escape(label)}" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{at:.0f}">'
        '<rect class="grip" x="-16" y="0%" width="32" height="100%"/>'
        '<line class="budget" x1="0" x2="0" y1="0%" y2="100%"/><circle class="knob" cx="0" cy="0" r="8"/></svg>'
    )


def _stretched(inner: str) -> str:
    return f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" width="100%" height="100%">{inner}</svg>'


def _svg(parts: Iterable[str], name: str, label: str, extra: str = "", style: str = "") -> Markup:
    head = f'<svg class="plot {style}" id="{name}" role="group" aria-label="{escape(label)}" {extra}>'
    return Markup("".join([head, *parts, "</svg>"]))
