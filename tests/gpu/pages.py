"""The page: what became of each item, and its figures as tables, part by part."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.evidence.tables import table
from tests.gpu.items import PARTS, items_of, read
from tests.gpu.shapes import Shapes

CPU_BANNER = (
    "**No GPU took part. These numbers come from tiny shapes on a CPU and prove that the script runs, nothing else.**"
)


def write(out: Path, shapes: Shapes, name: str) -> None:
    """``summary.md``, from what the items left behind."""
    items = items_of(shapes)
    known = {item.slug: read(out, item) for item in items}
    lines = ["# What was asked of the GPU", "", *([CPU_BANNER] if name == "tiny" else _where(known.values())), ""]
    became = (
        (slug, _state(found), found.get("seconds", ""), found.get("message", "")) for slug, found in known.items()
    )
    lines.append(table(("item", "state", "seconds", ""), became))
    for part, title in PARTS.items():
        lines += ["", f"# {part}. {title}"]
        for item in (item for item in items if item.part == part):
            found = known[item.slug]
            lines += ["", f"## {item.name}", ""]
            if _state(found) != "done":
                lines += [f"{_state(found)}. {found.get('message', '')}".strip(), ""]
            if origin := found.get("data_from"):
                lines += [f"The numbers are from {origin}.", ""]
            lines += _shown(found.get("data", {}))
    (out / "summary.md").write_text("\n".join(lines) + "\n")


def _state(found: Mapping[str, Any]) -> str:
    return found.get("state", "not run")


def _where(known: Iterable[Mapping[str, Any]]) -> list[str]:
    """Device, versions and dates, once each."""
    lines: dict[str, None] = {}
    for found in known:
        if environment := found.get("environment"):
            versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items())
            lines[f"{environment['device']['name']}, {versions}, {found.get('date', '')}"] = None
    return list(lines)


def _shown(data: Mapping[str, Any], level: int = 3) -> Iterator[str]:
    """Rows by name as a table, figures by name as another, and what holds more of both under headings."""
    rows: Mapping[str, Any] = data.get("rows", {})
    if rows:
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        yield table(("", *columns), ([name, *(_number(row.get(c)) for c in columns)] for name, row in rows.items()))
        yield ""
    if figures := {k: v for k, v in data.items() if not isinstance(v, Mapping)}:
        yield table(("", ""), ((k, _number(v)) for k, v in figures.items()))
        yield ""
    for name, inner in data.items():
        if isinstance(inner, Mapping) and name != "rows":
            yield f"{'#' * level} {name}"
            yield ""
            yield from _shown(inner, level + 1)


def _number(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, (list, tuple)):
        return "; ".join(map(_number, value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value / 2**20:,.1f} MiB" if value >= 1 << 20 else str(value)
    return f"{value:.4g}"
