"""The best plans of several micro-batches timed side by side: their own searches ran at different moments.

A machine drifts by more between two searches than neighbouring micro-batches differ by.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from autockpt.errors import AutockptError, MeasurementError
from autockpt.history.rundir import RunDirectory
from autockpt.measuring import Measurer, StepRunner
from autockpt.measuring.base import beats_counted
from autockpt.measuring.runner import turn_order
from autockpt.schema import Choice, Listener, Measurement, SearchOutcome, Trial, plan_hash, words
from autockpt.schema.batches import BatchSetting, SizesTimed
from autockpt.schema.choices import dump_choices, parse_choices
from autockpt.tuning.jobs import with_rows
from autockpt.tuning.timing import Final, first_rounds, most_cycles, play, remeasured

NEAR = 0.5  # sizes that seemed at most this much slower than the best may be faster: so much do machines drift
MOST = 3  # sizes compared
SECONDS = 30.0
Meet = Callable[[int], AbstractContextManager[Measurer]]
"""Opens a measurer whose step has so many rows in its batch, or can be cut to fewer."""


def interleaved(runner: StepRunner, payload: dict[str, Any]) -> dict[str, Any]:
    """Seconds of whole updates, ``rounds`` of each of ``payload["plans"]``, which differ in rows and accumulation too.

    Raises MeasurementError for a batch that cannot be divided into rows.
    """
    runners, choices = {}, {}
    for name, asked in payload["plans"].items():
        step = with_rows(runner.workload, asked["rows"], asked["accumulate"])
        if step is None:
            raise MeasurementError("the batch cannot be divided into rows")
        runners[name], choices[name] = runner.of(step), parse_choices(asked["choices"])
    times: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(payload["rounds"]):
        for name in turn_order(list(runners), payload["first"] + number):
            budget_bytes = payload["budget_bytes"]
            times[name] += runners[name].compare({name: choices[name]}, rounds=1, budget_bytes=budget_bytes)[name]
    return times


def timed_together(
    best: Mapping[int, tuple[BatchSetting, SearchOutcome]], meet: Meet, seconds: float, listener: Listener
) -> tuple[Final | None, str]:
    """Race the micro-batches that look best; None where one of them stands alone. The race by size, and a note on it.

    The result is kept in the run directory of each, and is the answer as long as the same plans are compared.
    """
    seemed = {size: s.update_seconds for size, (s, _) in best.items() if isinstance(s.score, Measurement)}
    near = [
        size for size in sorted(seemed, key=seemed.__getitem__) if seemed[size] <= min(seemed.values()) * (1 + NEAR)
    ]
    near = sorted(near[:MOST])
    if len(near) < 2:
        return None, ""
    trials = [_as_trial(size, *best[size]) for size in near]
    plans = {t.number: t.plan_hash for t in trials}
    folder = best[near[0]][1].run_directory
    run = None if folder is None else RunDirectory.open(folder)
    known = None if run is None else run.sizes()
    if known is not None and known.plans == plans:
        final = Final(known.winner, {size: list(times) for size, times in known.times.items()}, known.undecided)
    elif first_rounds(trials) > seconds:
        return None, "The time limit left no room to time the micro-batches side by side."
    else:
        seconds = min(SECONDS, seconds)
        listener.stage("time batch sizes side by side", most_cycles(trials, (), seconds=seconds))
        try:
            final = _raced(trials, {size: best[size][0] for size in near}, best[near[0]][1], meet, seconds, listener)
        except AutockptError as error:
            return None, f"The micro-batches were not timed side by side: {error.message}"
        times = {size: tuple(taken) for size, taken in final.times.items()}
        timed = SizesTimed(plans=plans, winner=final.winner, undecided=final.undecided, times=times)
        for kept in (best[size][1].run_directory for size in near):
            if kept is not None:  # the page of each shows them
                RunDirectory.open(kept).write_sizes(timed)
    return final, _said(final)


def put_right(settings: Sequence[BatchSetting], final: Final) -> list[BatchSetting]:
    """Settings under the conditions of the race: those that took part by what they took there, others in proportion."""
    known = {s.batch_size: s for s in settings if s.role == "found" and s.batch_size in final.times}
    change = {size: final.seconds(size) / s.update_seconds for size, s in known.items()}
    common = math.exp(statistics.fmean(map(math.log, change.values())))

    def right(found: BatchSetting) -> BatchSetting:
        if not isinstance(found.score, Measurement):
            return found
        if found.role == "found" and found.batch_size in final.times:
            score = remeasured(found.score, found.batch_size, final)
        else:
            seconds = found.score.step_seconds * change.get(found.batch_size, common)
            score = found.score.model_copy(update={"step_seconds": seconds})
        return found.model_copy(update={"score": score})

    return [right(found) for found in settings]


def _as_trial(size: int, found: BatchSetting, outcome: SearchOutcome) -> Trial:
    """The plan of a size as one of the contenders, numbered by its size."""
    assert outcome.plan is not None and isinstance(found.score, Measurement)
    choices = outcome.plan.expand_planned()
    return Trial(
        number=size,
        name=f"micro-batch {size}",
        encoding="final",
        choices=choices,
        plan_hash=plan_hash(choices),
        state="measured",
        feasible=True,
        measured=found.score,
    )


def _raced(
    trials: Sequence[Trial],
    settings: Mapping[int, BatchSetting],
    outcome: SearchOutcome,
    meet: Meet,
    seconds: float,
    listener: Listener,
) -> Final:
    done = 0
    with meet(max(settings)) as measurer, beats_counted(measurer, listener):
        budget_bytes = outcome.budget.bytes if measurer.environment.device.enforces_limit else None

        def compare(plans: Mapping[str, Mapping[str, Choice]], rounds: int) -> Mapping[str, Sequence[float]]:
            nonlocal done
            asked = {
                name: {
                    "rows": int(name),
                    "accumulate": settings[int(name)].accumulate,
                    "choices": dump_choices(choices),
                }
                for name, choices in plans.items()
            }
            payload = {"plans": asked, "rounds": rounds, "first": done, "budget_bytes": budget_bytes}
            done += rounds
            return measurer.call("autockpt.tuning.side_by_side:interleaved", payload)

        return play(trials, (), compare, seconds=seconds)


def _said(final: Final) -> str:
    """What the race showed, in a sentence."""
    best = final.seconds(final.winner)
    others = sorted((size for size in final.times if size != final.winner), key=final.seconds)
    said = [
        f"{size}: {words.share(final.seconds(size) / best - 1, signed=True)}"
        + (" (cannot be distinguished)" if size in final.undecided else "")
        for size in others
    ]
    return (
        f"Timed side by side, an update is fastest in micro-batches of {final.winner}; time with the others: "
        f"{', '.join(said)}."
    )
