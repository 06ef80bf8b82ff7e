"""How fast a step can be at all: the optimum where costs add up; elsewhere the best of a long search, and a bound.

Independent of autockpt's profile and ghost-run code: the numbers come straight from the scripts of the family. The
script of the study checks them against the simulator on random plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autockpt.schema import Choice
from autockpt.schema.problem import Option, Point, Problem, UnitOptions
from autockpt.solvers import exact
from tests.evidence.samplers.family import HIDDEN, INCOMING, OUTGOING, OUTPUT, Instance, Kind, Line, script
from tests.evidence.samplers.steps import resident_bytes

LOSS = 2e-4


@dataclass(frozen=True)
class Costs:
    """Bytes and seconds by unit and choice, arrays of shape (units, choices)."""

    instance: Instance
    menu: tuple[Choice, ...]
    hidden: np.ndarray  # what enters each unit, and what leaves the last
    forward: np.ndarray  # most bytes of its own while it runs forward
    backward: np.ndarray
    kept: np.ndarray
    moved: np.ndarray
    rerun: np.ndarray  # seconds
    run: np.ndarray  # seconds forward and backward, shape (units, 2)
    gradients: np.ndarray  # bytes of weight gradients

    @classmethod
    def of(cls, instance: Instance, menu: Sequence[Choice]) -> Costs:
        rows = [[_row(kind, choice) for choice in menu] for kind in instance.kinds]
        table = np.array([[row[:4] for row in unit] for unit in rows], dtype=np.int64)
        rerun = np.array([[row[4] for row in unit] for unit in rows])
        run = [[sum(op.seconds for op in k.ops), sum(op.back_seconds for op in k.ops)] for k in instance.kinds]
        hidden = [k.hidden for k in instance.kinds] + [instance.kinds[-1].ops[-1].size]
        weights = np.array([k.weights for k in instance.kinds])
        forward, backward, kept, moved = np.moveaxis(table, 2, 0)
        return cls(
            instance, tuple(menu), np.array(hidden), forward, backward, kept, moved, rerun, np.array(run), weights
        )

    def picks(self, choices: Mapping[str, Choice]) -> np.ndarray:
        """A plan as indices into the menu."""
        return np.array([self.menu.index(choices[name]) for name in self.instance.units])

    def plan(self, picks: Iterable[int]) -> dict[str, Choice]:
        return {name: self.menu[int(p)] for name, p in zip(self.instance.units, picks, strict=True)}

    def judge(self, picks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Step seconds and peak bytes of plans, ``picks`` of shape (plans, units)."""
        return self._seconds(picks), self._peaks(picks)

    def _peaks(self, picks: np.ndarray) -> np.ndarray:
        inst, n = self.instance, len(self.hidden) - 1
        at = np.arange(n)
        before = np.concatenate([np.zeros((len(picks), 1), int), np.cumsum(self.kept[at, picks], 1)], 1)
        away = self.moved[at, picks] if inst.queues else np.zeros_like(picks)
        away = np.concatenate([np.zeros((len(picks), 1), int), away], 1)  # of the unit before
        forward = before[:, :n] + self.hidden[:n] + self.forward[at, picks] + away[:, :n]
        later = np.concatenate([np.cumsum(self.gradients[::-1])[::-1][1:], [0]])
        backward = before[:, :n] + self.backward[at, picks] + away[:, :n] + later
        head = before[:, n] + self.hidden[n] + inst.head_bytes
        turn = head + np.maximum(away[:, n], inst.kinds[-1].hidden)
        most = np.maximum(forward.max(1), backward.max(1))
        return resident_bytes(inst) + np.maximum(np.maximum(most, turn), self.gradients.sum())

    def _seconds(self, picks: np.ndarray) -> np.ndarray:
        inst, n = self.instance, len(self.hidden) - 1
        at = np.arange(n)
        copy = self.moved[at, picks] / inst.bandwidth
        rerun = self.rerun[at, picks]
        fixed = 3 * inst.head_seconds + inst.optimizer_seconds
        if not inst.queues:
            return self.run.sum() + fixed + rerun.sum(1) + 2 * copy.sum(1)
        now = np.zeros(len(picks))
        free, end = np.zeros(len(picks)), np.zeros(len(picks))
        for i in range(n):
            now = now + self.run[i, 0]
            waits_for = np.where(copy[:, i - 1] > 0, end, 0.0) if i else 0.0
            free = np.where(copy[:, i] > 0, np.maximum(free, now) + copy[:, i], free)
            end = free
            now = np.maximum(now, waits_for)
        now = now + inst.head_seconds
        now = np.maximum(now, np.where(copy[:, n - 1] > 0, end, 0.0)) + 2 * inst.head_seconds
        free, back = np.zeros(len(picks)), np.where(copy[:, n - 1] > 0, now + copy[:, n - 1], 0.0)
        free = back
        for i in reversed(range(n)):
            mine = back
            if i:
                issued = copy[:, i - 1] > 0
                free = np.where(issued, np.maximum(free, now) + copy[:, i - 1], free)
                back = np.where(issued, free, 0.0)
            now = np.maximum(now, mine) + rerun[:, i] + self.run[i, 1]
        return now + inst.optimizer_seconds

    def problem(self, budget: int, seconds: np.ndarray, host: int | None = None) -> Problem:
        """Bytes as they would be were what is moved gone at once; exact without queues, with them a lower bound."""
        inst, n = self.instance, len(self.hidden) - 1
        units = []
        for i, name in enumerate(inst.units):
            options = tuple(
                Option(
                    choice=choice,
                    seconds=float(seconds[i, c]),
                    kept=int(self.kept[i, c]),
                    forward=int(self.forward[i, c]),
                    backward=int(self.backward[i, c]),
                    host=int(self.moved[i, c]),
                )
                for c, choice in enumerate(self.menu)
            )
            units.append(UnitOptions(name=name, options=options))
        base = resident_bytes(inst)
        later = int(self.gradients.sum())
        head = base + int(self.hidden[n]) + inst.head_bytes + inst.kinds[-1].hidden
        points = [Point(base=base + int(self.hidden[i]), prefix=i, own=i, phase="forward") for i in range(n)]
        points += [Point(base=head, prefix=n), Point(base=base + later, prefix=0)]
        for i in range(n):
            later -= int(self.gradients[i])
            points.append(Point(base=base + later, prefix=i, own=i, phase="backward"))
        fixed = 3 * inst.head_seconds + inst.optimizer_seconds
        return Problem(
            units=tuple(units),
            points=tuple(points),
            budget_bytes=budget,
            host_budget=host,
            base_seconds=float(self.run.sum() + fixed),
        )

    def copy(self, unit: int, pick: int) -> float:
        """Seconds of moving what a unit moves, one way."""
        return float(self.moved[unit, pick]) / self.instance.bandwidth

    def priced(self, price: float) -> np.ndarray:
        """Extra seconds where copies cost ``price`` times what they take inline."""
        return self.rerun + price * 2 * self.moved / self.instance.bandwidth


@dataclass(frozen=True)
class Reference:
    """The fastest plan known, its seconds, and what no plan can beat; both are the optimum where costs add up."""

    choices: dict[str, Choice]
    seconds: float
    bound: float


def optimum(costs: Costs, budget: int) -> Reference:
    """The exact optimum of an instance whose costs add up. Raises AssertionError where it could not be proven."""
    answer = exact(costs.problem(budget, costs.priced(1.0)), gap=1e-9, time_limit=60)
    (seconds,), (peak,) = costs.judge(costs.picks(answer.choices)[None])
    assert answer.feasible and peak <= budget and answer.gap <= 1e-6
    return Reference(answer.choices, float(seconds), float(seconds) * (1 - answer.gap))


def scheduled(costs: Costs, budget: int, *, loss: float = LOSS) -> Reference:
    """The optimum of an instance with queues, proven to within a share ``loss`` of the step.

    What is moved has until the end of the next unit's forward, and comes back during that unit's backward, so both the
    time and the bytes of a unit depend on its own choice and on what the unit before it moves:
    forward max(own, copy of the one before), backward max(own and rerun, copy of the one before). Label setting along
    the units with the bytes kept so far and that last move as state; of two labels the leaner is kept unless the other
    is faster by more than ``loss`` / units of the step.
    """
    inst, n = costs.instance, len(costs.hidden) - 1
    moving = [c for c in range(len(costs.menu)) if costs.moved[:, c].any()]
    step = loss * float(costs.run.sum()) / n
    later = np.concatenate([np.cumsum(costs.gradients[::-1])[::-1][1:], [0]])
    base = resident_bytes(inst)
    labels_of: dict[int | None, tuple[np.ndarray, np.ndarray]] = {None: (np.zeros(1, np.int64), np.zeros(1))}
    trails: list[dict[int | None, _Trail]] = []
    for i in range(n):
        grown: dict[int | None, list[_Labels]] = {}
        for before, (kept, seconds) in labels_of.items():
            away, copy = (0, 0.0) if before is None else (costs.moved[i - 1, before], costs.copy(i - 1, before))
            for c in range(len(costs.menu)):
                own = max(costs.hidden[i] + costs.forward[i, c], later[i] + costs.backward[i, c])
                fits = np.flatnonzero(kept <= budget - base - own - away)
                more = max(costs.run[i, 0], copy) + max(costs.run[i, 1] + costs.rerun[i, c], copy)
                state = c if c in moving else None
                grown.setdefault(state, []).append(
                    _Labels(kept[fits] + costs.kept[i, c], seconds[fits] + more, fits, before, c)
                )
        labels_of, trail = {}, {}
        for state, parts in grown.items():
            labels_of[state], trail[state] = _thinned(parts, step)
        trails.append(trail)
    best: tuple[float, int | None, int] | None = None
    for state, (kept, seconds) in labels_of.items():
        away, copy = (0, 0.0) if state is None else (costs.moved[n - 1, state], costs.copy(n - 1, state))
        turn = base + costs.hidden[n] + inst.head_bytes + max(away, inst.kinds[-1].hidden)
        total = seconds + max(inst.head_seconds, copy) + copy
        total[kept + turn > budget] = np.inf
        at = int(np.argmin(total)) if len(total) else 0
        if len(total) and (best is None or total[at] < best[0]):
            best = (float(total[at]), state, at)
    assert best is not None and np.isfinite(best[0]) and base + costs.gradients.sum() <= budget, "nothing fits"
    picks = _traced(trails, best[1], best[2])
    (seconds,), (peak,) = costs.judge(picks[None])
    value = best[0] + 2 * inst.head_seconds + inst.optimizer_seconds
    assert abs(seconds - value) < 1e-9 * value and peak <= budget
    return Reference(costs.plan(picks), float(seconds), float(seconds) - n * step)


@dataclass(frozen=True)
class _Labels:
    """Partial plans that end with one choice after one move: bytes kept, seconds, and the labels they grew from."""

    kept: np.ndarray
    seconds: np.ndarray
    parent: np.ndarray
    before: int | None
    choice: int


@dataclass(frozen=True)
class _Trail:
    """For each surviving label: which label it grew from, after which move, by which choice."""

    parent: np.ndarray
    part: np.ndarray
    parts: tuple[tuple[int | None, int], ...]


def _thinned(parts: list[_Labels], step: float) -> tuple[tuple[np.ndarray, np.ndarray], _Trail]:
    """The Pareto front of labels, one for each ``step`` of seconds."""
    kept = np.concatenate([p.kept for p in parts])
    seconds = np.concatenate([p.seconds for p in parts])
    part = np.repeat(np.arange(len(parts)), [len(p.kept) for p in parts])
    parent = np.concatenate([p.parent for p in parts])
    order = np.lexsort((seconds, kept))
    level = np.floor(np.minimum.accumulate(seconds[order]) / step) if len(order) else np.zeros(0)
    order = order[np.diff(level, prepend=np.inf) < 0]
    origins = tuple((p.before, p.choice) for p in parts)
    trail = _Trail(parent[order].astype(np.int32), part[order].astype(np.int16), origins)
    return (kept[order], seconds[order]), trail


def _traced(trails: list[dict[int | None, _Trail]], state: int | None, at: int) -> np.ndarray:
    picks = []
    for trail in reversed(trails):
        here = trail[state]
        state, choice = here.parts[here.part[at]]
        at = int(here.parent[at])
        picks.append(choice)
    return np.array(picks[::-1])


def _row(kind: Kind, choice: Choice) -> tuple[int, int, int, int, float]:
    """Forward, backward, kept and moved bytes, seconds that run again."""
    played = script(kind, choice)
    held = sum(kind.size(k) for k in played.held)
    forward = _most(kind, played.forward, 0)
    backward = _most(kind, played.backward, held + kind.hidden)
    rerun = sum(kind.ops[line.op].seconds for line in played.backward if line.phase == "recompute")
    # what enters counts apart while the unit runs forward, and with what it keeps after that
    return forward, backward, 0 if played.moved else held, held if played.moved else 0, rerun


def _most(kind: Kind, lines: Sequence[Line], level: int) -> int:
    sizes: dict[object, int] = {k: kind.size(k) for k in range(HIDDEN, len(kind.ops))}
    sizes |= {OUTPUT: kind.ops[-1].size, INCOMING: kind.hidden, OUTGOING: kind.hidden}
    most = level
    for line in lines:
        level += sum(size for _, size, _ in line.born)
        most = max(most, level)
        sizes |= {key: size for key, size, _ in line.born}
        level -= sum(sizes[key] for key in line.died)
    return most
