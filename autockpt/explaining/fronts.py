"""Per kind of unit: which choices are worth considering, and which of them the plan took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from autockpt.explaining.holdings import joined
from autockpt.history.trials import undominated
from autockpt.schema import Choice, Menu, Unit
from autockpt.schema.explanation import Bargain, Front


def fronts(menus: Sequence[Menu], blocks: Sequence[Unit], choices: Mapping[str, Choice]) -> tuple[Front, ...]:
    """The front of every kind of unit: bytes kept for its backward against seconds over saving.

    Dominated choices that the plan took are listed and say so. ``choices`` by unit name.
    """
    return tuple(_front(menu, [u for u in blocks if u.kind == menu.kind], choices) for menu in menus)


def _front(menu: Menu, units: Sequence[Unit], choices: Mapping[str, Choice]) -> Front:
    taken = Counter(choices[u.name] for u in units if u.name in choices)
    plain = menu.items[0].seconds
    best = [item.choice for item in undominated(menu.items, lambda i: (i.kept_bytes, i.seconds))]
    rows = [
        Bargain(
            choice=item.choice,
            kept_bytes=item.kept_bytes,
            extra_seconds=item.seconds - plain,
            taken=taken.get(item.choice, 0),
            dominated=item.choice not in best,
        )
        for item in menu.items
    ]
    shown = [row for row in rows if not row.dominated or row.taken]
    shown.sort(key=lambda row: (-row.kept_bytes, row.extra_seconds))
    return Front(
        units=joined([u.name for u in units]),
        cls=units[0].cls if units else "",
        count=len(units),
        bargains=tuple(shown),
        left_out=len(rows) - len(shown),
    )
