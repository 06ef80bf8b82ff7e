"""The sweep's results as markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.evidence.sweep.trial import Result

_LONGEST = 240
HEADER = "| architecture | class | units | traced | plans equal | s | remark |\n|---|---|--:|---|---|--:|---|"


def row(result: Result) -> str:
    equal = f"{result.equal}/{result.plans}" if result.plans else "–"
    if result.refused:
        equal += f", {result.refused} refused"
    remark = "; ".join((*result.failures, *result.remarks)).replace("|", "\\|").replace("\n", " ")
    cells = (result.name, result.cls, result.units or "–", result.traced, equal, f"{result.seconds:.1f}", remark)
    return f"| {' | '.join(map(str, cells))} |"


def markdown(results: Iterable[Result]) -> str:
    """Counts, then a table of those that train plainly, then one of those that do not."""
    ordered = sorted(results, key=lambda r: r.name)
    trained = [r for r in ordered if r.trained]
    rest = [r for r in ordered if not r.trained]
    parts = [summary(ordered), "## Trained\n", "\n".join((HEADER, *map(row, trained)))]
    if rest:
        reasons = [f"| {r.name} | {r.cls} | {_short('; '.join(r.remarks).replace('|', '/'))} |" for r in rest]
        parts += [
            "## Not trained plainly\n",
            "\n".join(("| architecture | class | reason |", "|---|---|---|", *reasons)),
        ]
    return "\n\n".join(parts).replace("\n\n\n", "\n\n") + "\n"


def _short(text: str) -> str:
    text = text.partition(" You can install it")[0]  # advice that transformers adds
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def summary(results: Sequence[Result]) -> str:
    trained = [r for r in results if r.trained]
    planned = [r for r in trained if r.plans]
    lines = [
        f"- architectures: {len(results)}; built and trained plainly: {len(trained)}",
        f"- ghost-traced: {sum(r.traced == 'yes' for r in trained)}, "
        f"recorded instead: {sum(r.traced == 'recorded' for r in trained)}, "
        f"neither: {sum(r.traced == 'no' for r in trained)}",
        f"- with units: {len(planned)}; every plan bit-equal: {sum(r.equal == r.plans for r in planned)}",
        f"- plans: {sum(r.plans for r in planned)}; bit-equal {sum(r.equal for r in planned)}, refused by name "
        f"{sum(r.refused for r in planned)}, unequal {count(planned, 'UNEQUAL')}, failed {count(planned, ' failed: ')}",
    ]
    return "\n".join(lines)


def count(results: Iterable[Result], word: str) -> int:
    return sum(word in failure for result in results for failure in result.failures)
