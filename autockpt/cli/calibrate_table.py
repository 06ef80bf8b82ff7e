"""A hardware description on screen, next to that of the same card where there is one."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from autockpt.schema import Hardware, format_bytes
from autockpt.schema.words import seconds, share
from autockpt.terminal import plain_table

_MAIN = {f"matrix rate {dtype}" for dtype in ("bfloat16", "float16", "float32")} | {
    "memory bandwidth", "launch, per op", "off the device", "back onto it", "memory", "context",
    "share: matrix", "share: attention", "share: bandwidth",
}  # fmt: skip
Row = tuple[str, float | None, float | None, str]


def hardware_rows(measured: Hardware, like: Hardware | None) -> list[Row]:
    """Figure, measured value, value of ``like``, and the unit: FLOP/s, B/s, B, s, a share, or per second."""
    other: dict[str, float] = like.matrix_flops if like else {}
    known: dict[str, float] = like.element_rates if like else {}
    theirs = like.efficiency if like else None
    rows: list[Row] = [
        (f"matrix rate {dtype}", measured.matrix_flops.get(dtype), other.get(dtype), "FLOP/s")
        for dtype in measured.matrix_flops | other
    ]
    plain = (
        ("vector rate", "vector_flops", "FLOP/s"),
        ("memory bandwidth", "bandwidth", "B/s"),
        ("cache bandwidth", "cache_bandwidth", "B/s"),
        ("cache", "cache_bytes", "B"),
        ("launch, per op", "launch_seconds", "s"),
        ("region run again", "region_seconds", "s"),
        ("op that is watched", "watch_seconds", "s"),
        ("least kernel", "kernel_seconds", "s"),
        ("off the device", "link_out", "B/s"),
        ("back onto it", "link_in", "B/s"),
        ("off, pageable", "pageable_out", "B/s"),
        ("back, pageable", "pageable_in", "B/s"),
        ("memory", "memory_bytes", "B"),
        ("context", "context_bytes", "B"),
    )
    rows += [(title, getattr(measured, name), getattr(like, name, None), unit) for title, name, unit in plain]
    shares = ("matrix", "attention", "attention_backward", "bandwidth", "link")
    rows += [
        (f"share: {name.replace('_', ' ')}", getattr(measured.efficiency, name), getattr(theirs, name, None), "share")
        for name in shares
    ]
    for dtype in (measured.efficiency.matrix_of or {}) | ((theirs.matrix_of if theirs else None) or {}):
        share_of_theirs = theirs.of_matrix(dtype) if theirs else None
        rows.append((f"share: matrix {dtype}", measured.efficiency.of_matrix(dtype), share_of_theirs, "share"))
    rows.append(("half size", measured.efficiency.half_size, getattr(theirs, "half_size", None), "elements"))
    for name in measured.element_rates | known:
        rows.append((f"elements: {name}", measured.element_rates.get(name), known.get(name), "1/s"))
    return [row for row in rows if row[1] or row[2]]


def print_hardware(measured: Hardware, like: Hardware | None, console: Console, *, path: str = "the file") -> None:
    """Print the figures that decide most: what was measured, what the description of the same card says, their ratio.

    The others are counted: they stand in the description, at ``path``.
    """
    console.print(Text(f"{measured.description or measured.name} ({measured.kind})", style="bold"))
    table = plain_table("figure", ">measured", *([] if like is None else [f">built-in: {like.name}", ">ratio"]))
    rows = hardware_rows(measured, like)
    shown = [row for row in rows if row[0] in _MAIN]
    for title, value, told, unit in shown:
        theirs = [] if like is None else [_written(told, unit), share(value / told) if value and told else ""]
        table.add_row(title, _written(value, unit), *theirs)
    console.print(table)
    console.print(Text(f"{len(rows) - len(shown)} more figures are in {path}", style="dim"))


def _written(value: float | None, unit: str) -> str:
    if value is None:
        return "—"
    if unit == "share":
        return share(value)
    if unit == "s":
        return seconds(value)
    if unit == "B":
        return format_bytes(value)
    if unit == "elements":
        return f"{value:.3g}"
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {letter}{unit}" if unit != "1/s" else f"{value / factor:.3g} {letter}/s"
    return f"{value:.3g} {unit}"
