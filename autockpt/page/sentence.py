"""What a run found in one sentence, and what to do next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Sequence

from autockpt.page.plans import MEASURED, SAID, WORTH, PlanPoint, Plans
from autockpt.schema import (
    SAVE,
    Comparison,
    ResolvedBudget,
    format_binary,
    format_decimal,
    words,
)
from autockpt.schema.known import ALL, NONE, OURS

MORE = 2 * 10**9  # bytes: the most of the question that a page answers by itself
STATES = {
    "empty": "Nothing was tried yet: the search has not come to its first trial.",
    "running": "The search is still at work; this is what it knows so far.",
    "stopped": "No end of the search is on record; this is what it knew by then.",
}


def sentence(
    rows: Sequence[Comparison], budget: ResolvedBudget | None, source: str, state: str, refused: str = ""
) -> str:
    """``Fits 24GB with 0.6 GiB to spare, 9 % faster than recomputing everything`` with what is sure of it."""
    if state == "infeasible":
        said = refused.partition("\n")[0]
        return f"{said[:1].upper()}{said[1:]}."
    known = {row.name: row.measured or row.predicted for row in rows}
    score = known.get(OURS)
    if score is None or budget is None:
        return STATES.get(state, "No plan was found.")
    spare = budget.bytes - score.peak_bytes
    asked = budget.asked
    if asked.endswith(("%", "act", "auto")):
        asked = f"{format_binary(budget.whole)} ({asked})"
    asked = f"{asked} less {budget.headroom}" if budget.headroom else asked
    said = [
        f"Fits {asked} with {format_binary(spare)} to spare" if spare >= 0 else f"Needs {format_binary(-spare)} more"
    ]
    if (other := known.get(ALL)) is not None:
        said.append(words.compared(score, other, "recomputing everything"))
    if (other := known.get(NONE)) is not None:
        fit = "" if other.peak_bytes <= budget.bytes else ", which does not fit"
        said.append(words.compared(score, other, "saving everything") + fit)
    word = "measured by real steps" if source == "measured" else "simulated, nothing was measured"
    text = "; ".join([", ".join(said[:2]), *said[2:]])
    return f"{text} ({word})." + (f" {STATES[state]}" if state in ("running", "stopped") else "")


def next_steps(
    plans: Plans,
    budget: ResolvedBudget | None,
    source: str,
    state: str,
    plan_file: str,
    simulated_only: Collection[str] = (),
) -> tuple[str, ...]:
    """What is worth doing after this run, most useful first. ``simulated_only``: options that no real step follows."""
    if state == "infeasible":
        return ('Raise the budget, or change the job: see "What would change the answer" below.',)
    if state == "running":
        return ("Wait for the search, and write this page again.",)
    if plans.best is None or budget is None:
        return ("Run the same command again: it continues where it stopped.",)
    best = plans.points[plans.best]
    steps = []
    if state == "stopped":
        steps.append("Run the same command again: it continues where it stopped.")
    if source == "simulated" and not simulated_only:
        steps.append(f"On the device, hold the plan against real steps: autockpt verify {shlex.quote(plan_file)}")
    else:
        steps.append("Load the plan with the lines above and train.")
    if best.basis == MEASURED and best.low is None:
        steps.append(
            f"The step times of {best.name} vary too much to compare plans: measure again with less else running (the "
            "same command with --again)."
        )
    elif rivals := _undecided(plans, best):
        names = ", ".join(rivals[:4]) + (" and others" if len(rivals) > 4 else "")
        steps.append(
            f"{best.name} cannot be distinguished from {names} at the noise of this machine: measure again with less "
            "else running (the same command with --again), or take the leaner one."
        )
    return tuple(steps)


def more_budget(plans: Plans, budget: ResolvedBudget | None, capacity: int | None = None) -> tuple[str, ...]:
    """What a little more memory buys, and the nearest larger budget with a faster plan; empty without an answer.

    ``capacity``: bytes of the device, of which no budget can have more.
    """
    if plans.best is None or budget is None:
        return ()
    best = plans.points[plans.best]
    most = math.inf if capacity is None else capacity - budget.headroom_bytes
    if budget.bytes >= 0.99 * most:
        return ("The budget is all that the device has: only a larger one could make a step faster.",)
    return tuple(filter(None, (_another(plans, best, budget, most), _nearest(plans, best, budget, most))))


def why(plans: Plans, prices: Sequence[float]) -> str:
    """Why this plan and no other: how many were tried, whether it is the fastest of them, what a leaner one costs.

    ``prices`` are seconds per byte of what its layers give up.
    """
    best = plans.points.get(plans.best or "")
    if best is None or not best.seconds or best.peak is None:
        return ""
    tried = [p for p in plans.points.values() if p.phase and p.basis]
    fitting = [p for p in tried if p.fits and p.seconds]
    faster = [p.name for p in fitting if p.seconds and p.seconds < best.seconds]
    said = f"Of {words.counted(len(tried), 'plan')} with numbers "
    said += f"{len(fitting)} fit" if len(fitting) > 1 else "only this one fits"
    if faster:
        said += (
            f". Within their error {', '.join(faster)} {'is' if len(faster) == 1 else 'are'} as fast; of equally fast "
            "plans the leanest is named, of equally lean ones the simplest."
        )
    else:
        said += ", and none of these is faster." if len(fitting) > 1 else "."
    known = [plans.points[t.predicted or t.tried or ""] for t in plans.thresholds if t.bytes < best.peak]
    leaner = [(p.peak, p.seconds, p.basis) for p in known if p.peak and p.seconds and p.key != best.key]
    if leaner:
        peak, seconds, basis = max(leaner, key=lambda p: p[0])
        more = seconds / best.seconds - 1
        cost = f"would cost {words.share(more)} more time" if more >= words.NO_DIFFERENCE else "would cost no more time"
        said += f" The next leaner one, {format_binary(best.peak - peak)} less, {cost} ({SAID[basis]})."
    if paid := [price * 2**20 for price in prices if price > 0]:
        least, most = words.seconds(min(paid)), words.seconds(max(paid))
        said += f" Each MiB that its layers give up costs {least if least == most else f'{least} to {most}'} of a step."
    return said


def _undecided(plans: Plans, best: PlanPoint) -> list[str]:
    """Names of other plans that fit and whose interval meets that of the best."""
    if best.low is None or best.high is None:
        return []
    others = (p for p in plans.points.values() if p.key != best.key and p.fits and p.basis == MEASURED)
    return [p.name for p in others if p.low and p.high and p.low <= best.high and best.low <= p.high]


def a_little_more(budget_bytes: int) -> int:
    """Bytes: a tenth of a budget in bytes, to one digit, at most ``MORE``."""
    digit = 10 ** (len(str(budget_bytes)) - 2) if budget_bytes >= 10 else 1
    return min(MORE, max(1, round(budget_bytes / 10 / digit)) * digit)


def _nearest(plans: Plans, best: PlanPoint, budget: ResolvedBudget, most: float) -> str:
    """The nearest larger budget that would buy a faster step, and that the device has."""
    larger = [threshold for threshold in plans.thresholds if budget.bytes < threshold.bytes <= most]
    for size, key in ((t.bytes, key) for t in larger for key in (t.predicted, t.tried)):
        point = plans.points.get(key or "")
        if point is None or not point.seconds or not best.seconds or point.seconds >= best.seconds * 0.995:
            continue
        gain = 1 - point.seconds / best.seconds
        return (
            f"The nearest larger budget that buys time: {format_binary(size - budget.bytes)} more "
            f"({_in_all(size, budget)}) would make a step {words.share(gain)} faster "
            f"({_basis(plans, point, gain * best.seconds)}); others are in the table below."
        )
    beyond = " of this device's memory" if any(t.bytes > most for t in plans.thresholds) else ""
    return f"No larger budget{beyond} is known to make a step faster."


def _another(plans: Plans, best: PlanPoint, budget: ResolvedBudget, most: float) -> str:
    """What a little more would buy, of ``most`` that there is: the fastest plan that is known to fit then."""
    more = int(min(a_little_more(budget.bytes), most - budget.bytes))
    known = [t for t in plans.thresholds if t.bytes <= budget.bytes + more]
    if not known or not best.seconds:
        return ""
    point = plans.points[known[-1].predicted or known[-1].tried or ""]
    asked = f"Another {format_decimal(more)} ({_in_all(budget.bytes + more, budget)})"
    gain = 1 - (point.seconds or best.seconds) / best.seconds
    if gain < WORTH:
        return f"{asked} would buy no time that is known of."
    saving = all(choice == SAVE for choice in point.choices.values())
    if (point.peak or 0) <= budget.bytes:  # no more memory is needed for it
        known = _basis(plans, point, gain * best.seconds)
        return f"Another plan that fits this budget would be {words.share(gain)} faster ({known})."
    what = f"saving everything, {words.seconds(point.seconds or 0.0)} a step" if saving else "another plan"
    said = f"{words.share(gain)} faster ({_basis(plans, point, gain * best.seconds)})"
    return f"{asked} would buy {what}, {said}, which needs {format_binary(point.peak or 0)}."


def _in_all(size: int, budget: ResolvedBudget) -> str:
    """A size that plans are held against, which what is left free of a budget comes on top of."""
    return f"{format_binary(size)}{' besides the headroom' if budget.headroom else ''}"


def _basis(plans: Plans, point: PlanPoint, gain: float) -> str:
    """How a gain of so many seconds is known, and whether predictions are good enough for it."""
    missed = plans.missed_seconds or 0.0
    doubt = f"; predictions missed by up to {words.seconds(missed)} here"
    return SAID[point.basis] + (doubt if not point.sure and gain < missed else "")
