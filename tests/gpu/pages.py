"""The pages: a table per part, what became of each item, and what none of it proves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.items import PARTS, Item, items_of, read
from tests.gpu.shapes import Shapes

CPU_BANNER = (
    "**No GPU took part. These numbers come from tiny shapes on a CPU and prove that the script runs, nothing else.**"
)


def write(out: Path, shapes: Shapes, name: str) -> None:
    """A page per part and ``summary.md``, from what the items left behind."""
    out.mkdir(parents=True, exist_ok=True)
    items = items_of(shapes)
    known = {item.slug: read(out, item) for item in items}
    for part, title in PARTS.items():
        mine = [item for item in items if item.part == part]
        lines = [f"# {part}. {title}", "", *_banner(name, known)]
        for item in mine:
            lines += _section(item, known[item.slug])
        (out / f"part{part}.md").write_text("\n".join(lines) + "\n")
    (out / "summary.md").write_text("\n".join(_summary(items, known, name)) + "\n")


def _banner(shapes: str, known: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [CPU_BANNER, ""] if shapes == "tiny" else [*_where(known), ""]


def _where(known: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Device, versions and dates, once each."""
    lines: dict[str, None] = {}
    for found in known.values():
        if environment := found.get("environment"):
            versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items())
            lines[f"{environment['device']['name']}, {versions}, {found.get('date', '')}"] = None
    return list(lines)


def _summary(items: Sequence[Item], known: Mapping[str, Mapping[str, Any]], shapes: str) -> Iterator[str]:
    yield "# What was asked of the GPU"
    yield ""
    yield from _banner(shapes, known)
    rows = (
        (i.slug, known[i.slug].get("state", "not run"), _seconds(known[i.slug]), known[i.slug].get("message", ""))
        for i in items
    )
    yield from _table(("item", "state", "seconds", ""), rows)


def _seconds(found: Mapping[str, Any]) -> str:
    return f"{found['seconds']:.0f}" if "seconds" in found else ""


def _section(item: Item, found: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {item.name}"
    yield ""
    state = found.get("state", "not run")
    if state != "done":
        yield f"{state}. {found.get('message', '')}".strip()
        yield ""
    if data := found.get("data"):
        if found.get("data_from"):
            yield f"The numbers are from {found['data_from']}."
            yield ""
        yield from _shown(data)
        yield ""


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"


def _shown(data: Mapping[str, Any], level: int = 3) -> Iterator[str]:
    """Rows by name as a table, figures by name as another, and what holds more of both under headings."""
    rows: Mapping[str, Any] = data.get("rows", {})
    if rows:
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        yield from _table(
            ("", *columns), ([name, *(_number(c, row.get(c)) for c in columns)] for name, row in rows.items())
        )
        yield ""
    if figures := {k: v for k, v in data.items() if not isinstance(v, Mapping)}:
        yield from _table(("", ""), ((k, _number(k, v)) for k, v in figures.items()))
        yield ""
    for name, inner in data.items():
        if isinstance(inner, Mapping) and name != "rows":
            yield f"{'#' * level} {name}"
            yield ""
            yield from _shown(inner, level + 1)


def _number(column: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, (list, tuple)):
        return "; ".join(_number(column, v) for v in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value / 2**20:,.1f} MiB" if value >= 1 << 20 else str(value)
    return f"{value:.4g}"
