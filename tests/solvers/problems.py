"""Problems to solve: small random ones with their brute-force answer, and ones shaped like a transformer."""

import itertools
import random
from collections.abc import Sequence
from typing import Literal

from hypothesis import strategies as st

from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, Choice, Save
from autockpt.solvers.problem import Assignment, Option, Point, Problem, UnitOptions, peak_of, seconds_of

MIB = 2**20
PHASES: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")


class Level(Save):
    """Stands for any choice that is yet to come: choices that differ by a number."""

    level: int = 0


def option(choice: Choice, seconds: float, kept: int, forward: int, backward: int) -> Option:
    return Option(choice=choice, seconds=seconds, kept=kept, forward=forward, backward=backward)


def uniform_problem(n: int = 4, budget: int = 0, *, gradient: int = 0, base: int = 100) -> Problem:
    """n equal units: save keeps 10, recompute 2 (+1 s), offload 1 (+3 s); forward then backward, gradients growing."""
    options = (
        option(SAVE, 0.0, 10, 11, 12),
        option(RECOMPUTE, 1.0, 2, 6, 13),
        option(OFFLOAD, 3.0, 1, 11, 12),
    )
    forward = [Point(base=base, prefix=i, own=i, phase="forward") for i in range(n)]
    backward = [
        Point(base=base + gradient * (n - 1 - i), prefix=i, own=i, phase="backward") for i in reversed(range(n))
    ]
    units = tuple(UnitOptions(name=f"layers.{i}", options=options) for i in range(n))
    points = (*forward, Point(base=base + 5, prefix=n), *backward)
    return Problem(units=units, points=points, budget_bytes=budget, base_seconds=10.0)


def equal_units(
    menu: Sequence[tuple[float, int, int, int]], forward: Sequence[int], backward: Sequence[int], budget: int
) -> Problem:
    """Units of one menu, whose points have bases of their own."""
    options = tuple(option(Level(level=k), *numbers) for k, numbers in enumerate(menu))
    units = tuple(UnitOptions(name=f"u{i}", options=options) for i in range(len(forward)))
    points = [Point(base=base, prefix=i, own=i, phase="forward") for i, base in enumerate(forward)]
    points += [Point(base=base, prefix=i, own=i, phase="backward") for i, base in enumerate(backward)][::-1]
    return Problem(units=units, points=tuple(points), budget_bytes=budget, base_seconds=10.0)


def brute_force(problem: Problem) -> tuple[float | None, int]:
    """Least extra seconds of any assignment within the budget (None: there is none), and the least peak of any."""
    fastest, leanest = None, None
    for picked in itertools.product(*[u.options for u in problem.units]):
        choices = {u.name: o.choice for u, o in zip(problem.units, picked, strict=True)}
        peak, seconds = peak_of(problem, choices), seconds_of(problem, choices)
        leanest = peak if leanest is None else min(leanest, peak)
        if peak <= problem.budget_bytes:
            fastest = seconds if fastest is None else min(fastest, seconds)
    assert leanest is not None
    return fastest, leanest


def check_exact(problem: Problem, answer: Assignment) -> None:
    """The answer's own numbers are true, and brute force finds nothing better."""
    fastest, leanest = brute_force(problem)
    assert set(answer.choices) == {u.name for u in problem.units}
    assert answer.peak == peak_of(problem, answer.choices)
    assert answer.feasible == (fastest is not None)
    if fastest is None:
        assert answer.peak == leanest
        return
    assert answer.peak <= problem.budget_bytes
    tolerance = 1e-9 + 1e-6 * (abs(problem.base_seconds) + abs(fastest))
    assert abs(answer.seconds - fastest) <= tolerance


@st.composite
def options(draw: st.DrawFn) -> tuple[Option, ...]:
    """One to three options, save first."""
    number = draw(st.integers(1, 3))
    size = st.integers(0, 60)
    seconds = st.floats(-0.2, 5, allow_nan=False).map(lambda s: round(s, 3))
    return tuple(
        option(Level(level=k), 0.0 if k == 0 else draw(seconds), draw(size), draw(size), draw(size))
        for k in range(number)
    )


@st.composite
def small_problems(draw: st.DrawFn) -> Problem:
    """Up to five units, equal or not, any points, a budget between hopeless and ample."""
    n = draw(st.integers(1, 5))
    menus = [draw(options()) for _ in range(draw(st.integers(1, 2)))]
    units = tuple(UnitOptions(name=f"u{i}", options=draw(st.sampled_from(menus))) for i in range(n))
    points = []
    for _ in range(draw(st.integers(1, 10))):
        own = draw(st.none() | st.integers(0, n - 1))
        prefix = own if own is not None else draw(st.integers(0, n))
        phase = None if own is None else draw(st.sampled_from(PHASES))
        points.append(Point(base=draw(st.integers(0, 100)), prefix=prefix, own=own, phase=phase))
    budget = draw(st.integers(0, 300))
    return Problem(
        units=units, points=tuple(points), budget_bytes=budget, base_seconds=draw(st.sampled_from([0.0, 10.0]))
    )


def transformer(units: int, choices: int, *, seed: int, share: float, identical: bool = True) -> Problem:
    """A step shaped like a transformer's, with a budget at ``share`` of the way from leanest to saving everything."""
    rng = random.Random(seed)
    first = _menu(rng, choices)
    menus = [first if identical else _menu(rng, choices) for _ in range(units)]
    gradient, head = int(rng.uniform(20, 60) * MIB), int(rng.uniform(200, 400) * MIB)
    weights = 4 * units * gradient
    forward = [Point(base=weights, prefix=i, own=i, phase="forward") for i in range(units)]
    backward = [
        Point(base=weights + head // 4 + (units - 1 - i) * gradient, prefix=i, own=i, phase="backward")
        for i in reversed(range(units))
    ]
    points = (*forward, Point(base=weights + head, prefix=units), *backward)
    named = tuple(UnitOptions(name=f"layers.{i}", options=menu) for i, menu in enumerate(menus))
    problem = Problem(units=named, points=points, budget_bytes=0, base_seconds=3.0 * units)
    ends = [peak_of(problem, {u.name: u.options[k].choice for u in problem.units}) for k in (0, 1)]
    return problem.model_copy(update={"budget_bytes": int(ends[1] + share * (ends[0] - ends[1]))})


def _menu(rng: random.Random, choices: int) -> tuple[Option, ...]:
    """Save, recompute, and choices in between that keep a part and run a part again."""
    full = rng.uniform(80, 120) * MIB
    least, seconds = full * rng.uniform(0.03, 0.06), rng.uniform(0.9, 1.1)
    menu = [(0.0, full, 1.02 * full, 1.3 * full), (seconds, least, 0.35 * full, 1.31 * full)]
    for _ in range(choices - 2):
        part = rng.uniform(0.1, 0.95)
        extra = seconds * (1 - part) ** 1.3 * rng.uniform(0.8, 1.2) + 0.01
        kept = least + (full - least) * part
        menu.append((extra, kept, full * rng.uniform(0.9, 1.05), full * rng.uniform(1.25, 1.4)))
    return tuple(option(Level(level=k), s, int(a), int(f), int(b)) for k, (s, a, f, b) in enumerate(menu))
