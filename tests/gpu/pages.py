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
        draw = _plain if "searches" in item.slug else _TABLES.get(str(item.part), _plain)
        yield from draw(data)
        yield ""


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"


def _plain(data: Mapping[str, Any]) -> Iterator[str]:
    """Rows by name where there are any, else figures by name."""
    rows: Mapping[str, Any] = data.get("rows", {})
    if rows:
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        yield from _table(
            ("", *columns), ([name, *(_number(c, row.get(c)) for c in columns)] for name, row in rows.items())
        )
        yield ""
    rest = {k: v for k, v in data.items() if k != "rows"}
    if rest:
        yield from _table(("", ""), ((k, _number(k, v)) for k, v in rest.items()))


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


def _compared(data: Mapping[str, Any]) -> Iterator[str]:
    """Calibration: figures side by side."""
    yield f"Beside the built-in description {data['like'] or '(there is none)'}."
    yield ""
    names = list(dict.fromkeys((*data["measured"], *data["built-in"])))
    rows = []
    for name in names:
        mine, other = data["measured"].get(name), data["built-in"].get(name)
        ratio = f"{mine / other:.2f}" if mine is not None and other else "–"
        rows.append((name, *(f"{v:.4g}" if v is not None else "–" for v in (mine, other)), ratio))
    yield from _table(("", "measured", "built in", "ratio"), rows)


def _foresight(data: Mapping[str, Any]) -> Iterator[str]:
    head = ("plan", "allocated, predicted", "measured", "error", "reserved, predicted", "measured", "error")
    head += ("step, predicted", "measured", "error", "signatures never timed")
    rows = []
    for name, row in data["rows"].items():
        cells: list[str] = [name]
        for what in ("allocated", "reserved", "step"):
            guess, real = row.get(f"{what}, predicted"), row.get(what)
            unit = _seconds_text if what == "step" else _size
            cells += [
                unit(guess),
                unit(real),
                f"{guess / real - 1:+.1%}" if guess and real else row.get("message", "–"),
            ]
        rows.append([*cells, f"{row['never timed']} of {row['signatures']}"])
    yield from _table(head, rows)


def _size(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.2f} MB"


def _seconds_text(value: float | None) -> str:
    return "–" if value is None else f"{value * 1e3:.1f} ms"


def _job(data: Mapping[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{k} {v}" for k, v in data["spec"].items())
    for budget, found in data["budgets"].items():
        search = found["search"]
        yield ""
        yield f"### {budget}"
        yield ""
        yield f"`{search['command']}`"
        yield ""
        if "message" in search:
            yield f"No plan: {search['message']}"
        else:
            yield (
                f"{search['trials']} trials in {search['seconds']:.0f} s, {search['measured seconds']:.0f} s of them "
                f"measured steps. {search['stopped']}. {'; '.join(search['notes'])}"
            )
        if rows := found.get("rows"):
            yield ""
            yield from _table(("plan", "fits", "peak", "fill", "step", "ours takes"), map(_job_row, rows.items()))


def _job_row(named: tuple[str, Mapping[str, Any]]) -> tuple[str, ...]:
    name, row = named
    step = f"{_seconds_text(row['step'])} ± {row['noise']:.1%}" if "step" in row else "–"
    fill = f"{row['fill']:.1%}" if "fill" in row else "–"
    ratio = row.get("ours over it")
    times = f"{ratio[1]:.3f} [{ratio[0]:.3f}, {ratio[2]:.3f}] ×" if ratio else "–"
    state = "yes" if row["state"] == "fits" else row["state"]
    note = f"{state} ({row['message']})" if row.get("message") and state == "failed" else state
    return name, note, _size(row.get("peak")), fill, step, times


_TABLES: dict[str, Any] = {"3": _compared, "4": _foresight, "5": _job, "6": _job}
