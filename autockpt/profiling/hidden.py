"""Copies that hide behind compute: which units a link has the time to offload, and when they are waited for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from autockpt.schema.choices import OFFLOAD, Offload
from autockpt.schema.problem import Problem, UnitOptions

NEARLY_FREE = 0.02
"""What is left of the seconds of copies that hide: so that no unit is offloaded without need."""


def hidden_copies(problem: Problem, forwards: Sequence[float], bandwidth: float) -> Problem:
    """The problem with ``offload`` at next to no extra seconds for as many units as the link has the time for.

    ``forwards`` are seconds of each unit's forward, ``bandwidth`` bytes per second off the device. The link takes one
    unit after the other, whose ``window`` ends where its copies should. What would not be off the device when all these
    forwards have ended stays as dear as it was; so does what the host has no room for.
    """
    spans = list(pairwise(accumulate(forwards, initial=0.0)))
    found: list[UnitOptions] = []
    free, room = 0.0, problem.host_budget
    for place, (unit, (begin, end)) in enumerate(zip(problem.units, spans, strict=True)):
        offered = next((option for option in unit.options if option.choice == OFFLOAD), None)
        if offered is not None and free <= end and (room is None or offered.host <= room):
            done = max(begin, free) + offered.host / bandwidth
            behind = next((i for i, (_, over) in enumerate(spans) if i > place and over >= done), None)
            if behind is not None:
                free, room = done, None if room is None else room - offered.host
                hidden = {"choice": Offload(window=behind - place), "seconds": NEARLY_FREE * offered.seconds}
                rest = [option for option in unit.options if option is not offered]
                unit = UnitOptions(name=unit.name, options=(*rest, offered.model_copy(update=hidden)))
        found.append(unit)
    return problem.model_copy(update={"units": tuple(found)})
