from __future__ import annotations

from autockpt.analysis.explain import fronts
from autockpt.schema import OFFLOAD, RECOMPUTE, SAVE, Choice, Menu, Unit
from autockpt.schema.choices import KeepAttention
from autockpt.schema.profile import MenuItem

UNITS = tuple(Unit(name=f"h.{i}", cls="Block", kind=0) for i in range(4))


def item(choice: Choice, kept: int, again: float) -> MenuItem:
    return MenuItem(
        choice=choice,
        kept_bytes=kept,
        forward_peak_bytes=0,
        backward_peak_bytes=0,
        forward_seconds=1.0,
        backward_seconds=2.0,
        recompute_seconds=again,
    )


MENU = Menu(
    kind=0,
    representative="h.2",
    items=(item(SAVE, 100, 0), item(RECOMPUTE, 10, 1.0), item(KeepAttention(), 30, 1.5), item(OFFLOAD, 0, 4.0)),
)


def test_dominated_choices_are_left_out() -> None:
    (front,) = fronts([MENU], UNITS, {})
    assert [(b.choice, b.kept_bytes, b.extra_seconds) for b in front.bargains] == [
        (SAVE, 100, 0.0),
        (RECOMPUTE, 10, 1.0),
        (OFFLOAD, 0, 4.0),
    ]
    assert (front.units, front.cls, front.count, front.left_out) == ("h.0-3", "Block", 4, 1)


def test_what_the_plan_took_is_shown_even_where_another_beats_it() -> None:
    choices: dict[str, Choice] = {"h.0": KeepAttention(), "h.1": RECOMPUTE, "h.2": RECOMPUTE, "h.3": SAVE}
    (front,) = fronts([MENU], UNITS, choices)
    taken = {str(b.choice): (b.taken, b.dominated) for b in front.bargains}
    assert taken == {"save": (1, False), "keep_attention": (1, True), "recompute": (2, False), "offload": (0, False)}
    assert front.left_out == 0
