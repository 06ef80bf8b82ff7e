"""Interleaved timing, so that a machine in use misleads nobody.

Candidates are timed interleaved with one reference plan. Trials are minutes apart, and what else runs meanwhile can
double a step. Ratios to a plan that is timed right before and right after do not see that, and all candidates' are to
the same plan. The best few are measured again, interleaved with the baselines, before one is named.

Among many noisy measurements the smallest is too small (the winner's curse): the name goes to the plan that wins when
all contenders run side by side. Whoever is surely slower drops out, so that time goes to those that are not (racing:
Maron & Moore 1994).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autockpt.history.statistics import Interval, judge, noise, ratio_interval
from autockpt.measuring import Measurer
from autockpt.schema import Choice, Measurement, Trial, plan_hash
from autockpt.tuning.trials import Trials

PRIOR_SCATTER, PRIOR_CYCLES = 0.015, 4  # of the logarithm of one cycle's seconds; how many cycles that guess is worth
FRESH = 15.0  # seconds that a reading of the standard holds for what comes next

WITHIN = 0.005
BATCH = 3
MOST_ROUNDS = 15
SWITCHING = 1.25
"""What a cycle of the finals takes on top of its step: interleaved plans are attached and removed each time."""

Choices = Mapping[str, Choice]
Compare = Callable[[Mapping[str, Choices], int], Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class Final:
    """Outcome of the finals. ``times`` are interleaved seconds per trial number, round by round from the first on, of
    some more rounds than of others; ``undecided`` names close rivals."""

    winner: int
    times: dict[int, list[float]]
    undecided: tuple[int, ...]

    def seconds(self, number: int) -> float:
        """Step seconds of one that took part: by its ratio to the winner in the rounds that both have, so that all are
        of the same conditions."""
        best = self.times[self.winner]
        return statistics.median(best) * _ratio(self.times[number], best).value

    @property
    def error(self) -> float:
        """One standard deviation, as a share, of what the undecided took, without what was common to their rounds."""
        times = [self.times[number] for number in (self.winner, *self.undecided)]
        rounds = min(map(len, times))
        if rounds < 2 or len(times) < 2:
            return 0.0
        logs = np.log([row[:rounds] for row in times])
        rest = logs - logs.mean(axis=0)
        rest -= rest.mean(axis=1, keepdims=True)
        return math.sqrt((rest**2).sum() / ((len(times) - 1) * (rounds - 1)) / rounds)


def play(candidates: Sequence[Trial], extra: Sequence[Trial], compare: Compare, *, seconds: float) -> Final:
    """Interleave ``candidates`` (one of them wins) and, in the first rounds, ``extra`` (measured for the table).

    Rounds go on until every rival's ratio to the leader is known within ± 0.5 % or lies surely above 1, at most
    15 rounds and ``seconds`` of wall time after the first few, which no batch of rounds is begun to exceed. Who is
    surely slower takes no further part.
    """
    choices = {t.number: t.choices for t in (*candidates, *extra)}
    times: dict[int, list[float]] = {number: [] for number in choices}
    playing, rivals = list(choices), [t.number for t in candidates]
    end = math.inf
    while True:
        began = time.monotonic()
        for name, values in compare({str(n): choices[n] for n in playing}, BATCH).items():
            times[int(name)].extend(values)
        now = time.monotonic()
        end, each = min(end, now + seconds), (now - began) / len(playing)
        leader = min(rivals, key=lambda n: statistics.median(times[n]))
        rivals = [n for n in rivals if n == leader or judge(_ratio(times[n], times[leader])) != "slower"]
        unsettled = [n for n in rivals if n != leader and _ratio(times[n], times[leader]).half_width > WITHIN]
        if not unsettled or len(times[leader]) >= MOST_ROUNDS or now + each * len(rivals) > end:
            break
        playing = rivals
    return Final(leader, times, tuple(n for n in rivals if n != leader))


def first_rounds(trials: Sequence[Trial]) -> float:
    """Seconds that the first rounds of the finals take, all or nothing: a cycle to warm up and a timed one each."""
    return SWITCHING * 2 * BATCH * sum(t.score_seconds for t in trials if t.measured is not None)


def most_cycles(candidates: Sequence[Trial], extra: Sequence[Trial], *, seconds: float) -> int:
    """Timed cycles of ``play`` where nobody drops out and nothing settles early; before each one is not timed."""
    begin = BATCH * (len(candidates) + len(extra))
    if len(candidates) == 1:
        return begin
    each = 2 * statistics.fmean(t.score_seconds for t in candidates)
    return begin + min((MOST_ROUNDS - BATCH) * len(candidates), max(0, int(seconds / each)))


def remeasured(measured: Measurement, number: int, final: Final) -> Measurement:
    """A trial's measurement with the times of the finals in place of its first ones; the peak stands."""
    times = final.times[number]
    return measured.model_copy(
        update={
            "step_seconds": final.seconds(number),
            "noise": noise(times),
            "steps": len(times),
            "times": tuple(times),
            "beside": (),
        }
    )


def _ratio(ours: Sequence[float], base: Sequence[float]) -> Interval:
    """Of the rounds that both have."""
    both = min(len(ours), len(base))
    return ratio_interval(ours[:both], base[:both])


@dataclass
class Pairing:
    """Times candidates interleaved with the first plan that was measured, the ``standard``: its choices and seconds.

    For devices where the standard needs no warm-up after another plan, as the CPU and plans that move nothing.
    """

    measurer: Measurer
    standard: tuple[Choices, float] | None = None
    _last: tuple[float, ...] = ()
    _taken: float = -math.inf
    _squares: float = PRIOR_CYCLES * PRIOR_SCATTER**2
    _freedom: float = PRIOR_CYCLES

    def begin(self, trials: Trials) -> None:
        """Keep to the plan that earlier trials were timed against."""
        first = next((t for t in trials.all if t.measured is not None and not t.measured.beside), None)
        if first is not None and first.measured is not None:
            self.standard = first.choices, first.measured.step_seconds

    def is_standard(self, trial: Trial) -> bool:
        """Whether others were timed against this trial's plan."""
        return self.standard is not None and plan_hash(self.standard[0]) == trial.plan_hash

    def measure(self, choices: Choices, *, steps: int, budget_bytes: int | None) -> Measurement:
        """Peak and seconds of a candidate over ``steps`` timed cycles; of the standard about as many.

        Raises what ``Measurer.measure`` raises.
        """
        if self.standard is None:
            alone = self.measurer.measure(choices, steps=steps + 1, budget_bytes=budget_bytes)
            # what it takes right after a switch, as from now on
            self.standard = dict(choices), statistics.median(self._read(choices, steps, budget_bytes))
            return alone
        standard, seconds = self.standard
        before = self._last if time.monotonic() - self._taken <= FRESH else self._read(standard, steps, budget_bytes)
        measured = self.measurer.measure(choices, steps=steps, budget_bytes=budget_bytes)
        beside = (*before, *self._read(standard, steps, budget_bytes))
        ours = measured.times or (measured.step_seconds,)
        self._learn(ours)
        self._learn(beside)
        ratio = math.exp(_mean_log(ours) - _mean_log(beside))
        # standard deviation of the logarithm of one cycle's seconds, over all trials of this search
        scatter = math.sqrt(self._squares / self._freedom)
        noise = 2 * scatter * math.sqrt(1 / len(ours) + 1 / len(beside))
        return measured.model_copy(
            update={"step_seconds": ratio * seconds, "noise": min(1.0, noise), "beside": tuple(beside)}
        )

    def _read(self, standard: Choices, steps: int, budget_bytes: int | None) -> tuple[float, ...]:
        """Cycles of the standard, half as many as the candidate's."""
        rounds = max(1, steps // 2)
        times = self.measurer.compare({"standard": standard}, rounds=rounds, warmup=0, budget_bytes=budget_bytes)
        self._last, self._taken = tuple(times["standard"]), time.monotonic()
        return self._last

    def _learn(self, times: Sequence[float]) -> None:
        mean = _mean_log(times)
        self._squares += sum((math.log(t) - mean) ** 2 for t in times)
        self._freedom += len(times) - 1


def _mean_log(times: Sequence[float]) -> float:
    return statistics.fmean(map(math.log, times))
