"""A hardware description on screen, next to that of the same card where there is one."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from autockpt.schema import Hardware, format_bytes
from autockpt.schema.words import seconds, share
from autockpt.terminal import plain_table

Row = tuple[str, float | None, float | None, str]
_FIGURES = (
    ("memory bandwidth", "bandwidth", "B/s"),
    ("launch, per op", "launch_seconds", "s"),
    ("off the device", "link_out", "B/s"),
    ("back onto it", "link_in", "B/s"),
    ("memory", "memory_bytes", "B"),
    ("context", "context_bytes", "B"),
)


def hardware_rows(measured: Hardware, like: Hardware | None) -> list[Row]:
    """Figures that decide most: name, measured value, value of ``like``, and the unit: FLOP/s, B/s, B, s or a share."""
    other: dict[str, float] = like.matrix_flops if like else {}
    rows: list[Row] = [
        (f"matrix rate {dtype}", measured.matrix_flops.get(dtype), other.get(dtype), "FLOP/s")
        for dtype in ("bfloat16", "float16", "float32")
    ]
    rows += [(title, getattr(measured, name), getattr(like, name, None), unit) for title, name, unit in _FIGURES]
    theirs = like.efficiency if like else None
    rows += [
        (f"share: {name}", getattr(measured.efficiency, name), getattr(theirs, name, None), "share")
        for name in ("matrix", "attention", "bandwidth")
    ]
    return [row for row in rows if row[1] or row[2]]


def print_hardware(measured: Hardware, like: Hardware | None, console: Console, *, path: str = "the file") -> None:
    """Print what was measured, what the description of the same card says, and their ratio; all else is at ``path``."""
    console.print(Text(f"{measured.description or measured.name} ({measured.kind})", style="bold"))
    table = plain_table("figure", ">measured", *([] if like is None else [f">built-in: {like.name}", ">ratio"]))
    for title, value, known, unit in hardware_rows(measured, like):
        theirs = [] if like is None else [_written(known, unit), share(value / known) if value and known else ""]
        table.add_row(title, _written(value, unit), *theirs)
    console.print(table)
    console.print(Text(f"more figures are in {path}", style="dim"))


def _written(value: float | None, unit: str) -> str:
    if value is None:
        return "—"
    if unit == "share":
        return share(value)
    if unit == "s":
        return seconds(value)
    if unit == "B":
        return format_bytes(value)
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"
