"""Counts of verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.campaign.trial import Verdict

_WORDS = ("equal", "refused", "WRONG", "foreign", "CRASH", "HANG")
_UNFIT = ("invalid", "unsteady")


def summary(verdicts: Sequence[Verdict]) -> str:
    """One line of counts over all pairs that could serve."""
    counts = Counter(v.word for v in verdicts)
    fit = sum(counts[word] for word in _WORDS)
    ordinary = sum(v.word == "refused" and v.ordinary for v in verdicts)
    said = ", ".join(f"{word} {counts[word]}" for word in _WORDS)
    unfit = ", ".join(f"{word} {counts[word]}" for word in _UNFIT)
    return f"{fit} pairs: {said}; ordinary ones refused {ordinary}; not counted: {unfit}"


def markdown(verdicts: Sequence[Verdict]) -> str:
    """Counts by choice, by group of families and by family."""
    fit = [v for v in verdicts if v.word in _WORDS]
    groups = {(family.partition(":")[0], v.number): v for v in fit for family in v.families}
    rows = [(name, v) for v in fit for name in dict.fromkeys(f.removesuffix(", late") for f in v.families)]
    return "\n".join(
        (
            summary(verdicts),
            "",
            _table("choice", ((v.choice or "(process lost)", v) for v in fit)),
            "A pair counts for every family that its program has.",
            "",
            _table("group", ((group, v) for (group, _), v in groups.items())),
            _table("family", rows),
        )
    )


def _table(name: str, rows: Iterable[tuple[str, Verdict]]) -> str:
    counts: dict[str, Counter[str]] = {}
    for key, verdict in rows:
        counts.setdefault(key, Counter())[verdict.word] += 1
    lines = [f"| {name} | {' | '.join(_WORDS)} |", f"|---{'|---:' * len(_WORDS)}|"]
    lines += [f"| {key} | {' | '.join(str(counts[key][w]) for w in _WORDS)} |" for key in sorted(counts)]
    return "\n".join((*lines, ""))
