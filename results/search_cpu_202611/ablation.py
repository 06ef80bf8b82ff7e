"""What Optuna adds to the solver, and what a search costs, on the 8-layer Llama of results/bench_cpu_202611.

    OMP_NUM_THREADS=1 python results/search_cpu_202611/ablation.py search 30% 45% 60% 85%
    OMP_NUM_THREADS=1 python results/search_cpu_202611/ablation.py rounds [seconds [budget …]]
    OMP_NUM_THREADS=1 python results/search_cpu_202611/ablation.py table > results/search_cpu_202611/ablation.md

``search`` makes one search of 20 trials per budget and keeps each trial with the time at which it ended, beside the
plan that the solver makes of the profile alone (a dry run with the same op times). These searches go on where one
would end because nothing can be faster by more than the noise; where that would have been is noted. ``rounds`` then
measures plans again, interleaved: the solver's, the two best of those that the solver made at fitted prices, the two
best of 12 trials, the two best of those before the search would have ended, the plan named after 20, and each plan
that was the best for a time. The first rounds choose among the two, as a search's finals do; all others judge. Both
continue where they were interrupted; ``table`` reads the files.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from autockpt.history.statistics import Interval, judge, ratio_interval
from autockpt.measuring import WorkerMeasurer
from autockpt.schema import (
    SearchRequest,
    Silence,
    Trial,
    WorkloadSpec,
    dump_choice,
    load_space,
    parse_budget,
    parse_choice,
    plan_hash,
)
from autockpt.tuning import run_search
from autockpt.tuning.proposers.solver import SolverProposer, neutral

HERE = Path(__file__).parent
SPEC = WorkloadSpec(
    model=str(HERE.parent / "bench_cpu_202611" / "llama.json"), batch_size=8, seq_len=256, packed=True, optimizer="none"
)
SPACE = load_space("knobs")
TRIALS, FEWER = 20, 12
CHOOSING, JUDGING = 3, 12  # rounds
BEST = 2
CLOSE = 1.03  # a plan that took more than that over the named one's time when it was tried is not measured again

Record = dict[str, Any]


class Notes(Silence):
    """Every trial as it ended, with the wall seconds since the whole search began."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.trials: list[Record] = []
        self.would_end: Record | None = None

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Searches do not end because nothing can be faster; the first time that one would have is noted."""
        ends, notes = SolverProposer.nothing_left, self

        def goes_on(self: SolverProposer) -> str:
            if notes.would_end is None and ends(self):
                notes.would_end = {"trials": self.trials.spent, "at": round(time.monotonic() - notes.began, 2)}
            return ""

        SolverProposer.nothing_left = goes_on
        try:
            yield
        finally:
            SolverProposer.nothing_left = ends

    def trial(self, trial: Trial, best: Trial | None) -> None:
        measured = trial.measured
        self.trials.append(
            {
                "number": trial.number,
                "name": trial.name,
                "encoding": trial.encoding,
                "neutral": trial.parameters in [neutral(SPACE, margin) for margin in SPACE.margins],
                "state": trial.state,
                "ended": round(time.monotonic() - self.began, 2),
                "hash": trial.plan_hash,
                "choices": choices_as_data(trial.choices),
                "predicted_seconds": trial.predicted.step_seconds if trial.predicted else None,
                "peak": measured.peak_bytes if measured else None,
                "seconds": measured.step_seconds if measured else None,
                "times": [round(t, 4) for t in measured.times] if measured else [],
                "beside": [round(t, 4) for t in measured.beside] if measured else [],
            }
        )
        print(trial.number, trial.name, trial.state, measured and round(measured.step_seconds, 3), file=sys.stderr)


def choices_as_data(choices: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dump_choice(choice) for name, choice in choices.items()}


def searched(spec: WorkloadSpec, budget: str, seed: int = 0, go_on: bool = True) -> Record:
    """One search and the solver's plan without one, as data. ``go_on``: to the last trial, whatever is to gain."""
    before, notes = os.getloadavg()[0], Notes()
    with tempfile.TemporaryDirectory() as out:
        request = SearchRequest(
            budget=parse_budget(budget),
            workload=spec,
            space=SPACE,
            device="cpu",
            trials=TRIALS,
            seed=seed,
            out=Path(out),
        )
        os.environ["AUTOCKPT_CACHE"] = str(Path(out) / "cache")  # op times are part of what a search costs
        with notes.going_on() if go_on else nullcontext():
            found = run_search(request, notes)
        seconds = time.monotonic() - notes.began
        size = parse_budget(f"{found.budget.bytes // 1000}KB")
        alone = run_search(request.model_copy(update={"budget": size, "dry_run": True}))
    assert found.plan is not None and alone.plan is not None
    return {
        "budget": budget,
        "bytes": found.budget.bytes,
        "seed": seed,
        "seconds": round(seconds, 1),
        "stopped": found.stopped,
        "would_end": notes.would_end,
        "stages": {s.name + (" (part)" if s.part else ""): round(s.seconds, 1) for s in found.stages},
        "named": plan_hash(found.plan.expand_planned()),
        "named_choices": choices_as_data(found.plan.expand_planned()),
        "solver_choices": choices_as_data(alone.plan.expand_planned()),
        "trials": notes.trials,
        "cores": sorted(os.sched_getaffinity(0)),
        "load": [before, os.getloadavg()[0]],
        "versions": found.plan.environment.versions if found.plan.environment else {},
        "notes": list(found.notes),
    }


def load_lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, record: Record) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


# -- which plans ------------------------------------------------------------------------------------------------------


def strip(choices: Mapping[str, Any]) -> str:
    """One character a layer; ``S`` is selective that keeps most matrix products, ``s`` one that keeps at most three,
    and ``w`` one that runs only some parts of the layer again."""
    letters = {"save": ".", "recompute": "R", "offload": "O", "keep_attention": "A", "recompute_offload": "B"}
    found = []
    for data in choices.values():
        choice = parse_choice(data)
        found.append(letters.get(choice.kind) or _selective(choice))
    return "".join(found)


def _selective(choice: Any) -> str:
    if choice.within:
        return "w"
    return "s" if len(choice.keep) <= 3 and choice != parse_choice("selective") else "S"


def fitting(search: Record, trials: Sequence[Record]) -> list[Record]:
    """Trials within the budget, fastest first."""
    known = [t for t in trials if t["peak"] is not None and t["peak"] <= search["bytes"]]
    return sorted(known, key=lambda t: t["seconds"])


def by_solver(search: Record) -> list[Record]:
    """Baselines and the solver's own plans at fitted prices: what there is without a sampler."""
    return [t for t in search["trials"] if t["encoding"] == "baseline" or t["neutral"]]


def incumbents(search: Record) -> list[Record]:
    """Each plan that was the best for a time, in order, but for those that are far behind the one that was named."""
    found: list[Record] = []
    for trial in search["trials"]:
        if trial in fitting(search, [trial]) and (not found or trial["seconds"] < found[-1]["seconds"]):
            found.append(trial)
    named = next(t for t in search["trials"] if t["hash"] == search["named"])
    return [t for t in found if t["seconds"] <= CLOSE * named["seconds"]]


def sets(search: Record) -> dict[str, list[Record]]:
    """Who may be named, by way of searching."""
    end = (search["would_end"] or {"trials": len(search["trials"])})["trials"]
    return {
        f"search as it would end, {end} trials": fitting(search, search["trials"][:end])[:BEST],
        "solver + refit": fitting(search, by_solver(search))[:BEST],
        f"+ Optuna, {FEWER} trials": fitting(search, search["trials"][:FEWER])[:BEST],
    }


def contenders(search: Record) -> dict[str, dict[str, Any]]:
    """All plans to be measured again, by hash."""
    trials = [*incumbents(search), *(t for ts in sets(search).values() for t in ts)]
    plans = {t["hash"]: t["choices"] for t in trials}
    solver = {name: parse_choice(data) for name, data in search["solver_choices"].items()}
    return plans | {plan_hash(solver): search["solver_choices"], search["named"]: search["named_choices"]}


# -- measuring again --------------------------------------------------------------------------------------------------


def rounds(path: Path, searches: Sequence[Record], spec: WorkloadSpec, seconds: float) -> None:
    """Interleaved rounds of each search's contenders, a line each, until all are done or ``seconds`` are over."""
    end = time.monotonic() + seconds
    with WorkerMeasurer(spec, "cpu") as worker:
        for search in searches:
            done = [line for line in load_lines(path) if line["budget"] == search["budget"]]
            plans = {h: {n: parse_choice(c) for n, c in choices.items()} for h, choices in contenders(search).items()}
            while len(done) < CHOOSING + JUDGING and time.monotonic() < end:
                times = worker.compare(plans, rounds=1)
                seconds_of = {h: round(t[0], 5) for h, t in times.items()}
                line = {"budget": search["budget"], "cores": sorted(os.sched_getaffinity(0)), "times": seconds_of}
                append(path, line)
                done.append(line)


def ratio(done: Sequence[Record], ours: str, base: str) -> Interval:
    return ratio_interval([r["times"][ours] for r in done], [r["times"][base] for r in done], robust=True)


def chosen(done: Sequence[Record], trials: Sequence[Record]) -> Record:
    """The fastest in the rounds that choose."""
    return min(trials, key=lambda t: statistics.median(r["times"][t["hash"]] for r in done[:CHOOSING]))


# -- tables -----------------------------------------------------------------------------------------------------------


def ways(search: Record, done: Sequence[Record]) -> dict[str, tuple[str, str]]:
    """Plan hash and where it came from, by way of searching."""
    solver = {name: parse_choice(data) for name, data in search["solver_choices"].items()}
    named = next(t for t in search["trials"] if t["hash"] == search["named"])
    found = {"solver alone": (plan_hash(solver), "no measured step but op times")}
    for way, trials in sets(search).items():
        found[way] = (best := chosen(done, trials))["hash"], origin(best)
    found[f"+ Optuna, {TRIALS} trials"] = search["named"], origin(named)
    return found


def origin(trial: Record) -> str:
    maker = "baseline" if trial["encoding"] == "baseline" else "solver" if trial["neutral"] else "Optuna's point"
    return f"trial {trial['number']} ({maker})"


def ablation_table(searches: Sequence[Record], lines: Sequence[Record]) -> None:
    print("| budget | plan by | plan | from | step time over the solver's alone | verdict |")
    print("|---|---|---|---|---|---|")
    for search in searches:
        done = [line for line in lines if line["budget"] == search["budget"]]
        plans = contenders(search)
        found = ways(search, done)
        base, _ = found["solver alone"]
        earlier: dict[str, str] = {}
        for way, (plan, place) in found.items():
            words = "the same plan" if plan == base else str(ratio(done[CHOOSING:], plan, base))
            verdict = "" if plan == base else judge(ratio(done[CHOOSING:], plan, base))
            if plan in earlier and plan != base:
                verdict += f", the plan of {earlier[plan]}"
            elif earlier and plan not in earlier and len(earlier) > 1:
                last = list(earlier)[-1]
                step = ratio(done[CHOOSING:], plan, last)
                verdict += f"; over {earlier[last]}: {step}, {judge(step)}"
            words = words if way != "solver alone" else "1"
            print(f"| {search['budget']} | {way} | `{strip(plans[plan])}` | {place} | {words} | {verdict} |")
            earlier.setdefault(plan, way)


def cycles(trials: Sequence[Record]) -> int:
    """Cycles that trials took: those timed, one for the peak (and to warm up), and those of the plan beside that were
    not the trial's before; the first of all takes one more, and one of itself beside."""
    total, before = 0, []
    for trial in trials:
        if trial["times"]:
            half = len(trial["beside"]) // 2
            shared = half if half and trial["beside"][:half] == before[-half:] else 0
            total += len(trial["times"]) + 1 + len(trial["beside"]) - shared + (0 if trial["beside"] else 2)
            before = trial["beside"] or before
    return total


def cost_table(searches: Sequence[Record], lines: Sequence[Record]) -> None:
    columns = ["budget", "until within 1 %: trials, cycles, wall", "until it would end", "to the last trial"]
    print("| " + " | ".join([*columns, "finals", "cores, load average before and after"]) + " |")
    print("|---|---|---|---|--:|---|")
    for search in searches:
        done = [line for line in lines if line["budget"] == search["budget"]][CHOOSING:]
        trials, named = search["trials"], search["named"]
        close = (t for t in incumbents(search) if t["hash"] == named or ratio(done, t["hash"], named).value <= 1.01)
        first = next(close, next(t for t in trials if t["hash"] == named))
        until = trials[: first["number"] + 1]
        end = search["would_end"]
        would_end = f"{end['trials']} trials, {end['at']:.0f} s" if end else "not before the last trial"
        load = ", ".join(f"{value:.1f}" for value in search["load"])
        print(
            f"| {search['budget']} | {measured(until)}, {cycles(until)}, {first['ended']:.0f} s | {would_end} "
            f"| {measured(trials)} trials, {cycles(trials)} cycles, {trials[-1]['ended']:.0f} s "
            f"| {search['stages']['finals']:.0f} s | {search['cores']}, {load} |"
        )


def measured(trials: Sequence[Record]) -> int:
    return sum(bool(t["times"]) for t in trials)


def stage_table(searches: Sequence[Record]) -> None:
    names = list(dict.fromkeys(name for search in searches for name in search["stages"]))
    print("| budget | " + " | ".join(names) + " | in all |")
    print("|---" * (len(names) + 2) + "|")
    for search in searches:
        cells = " | ".join(f"{search['stages'].get(name, math.nan):.1f} s" for name in names)
        print(f"| {search['budget']} | {cells} | {search['seconds']:.0f} s |")


def main() -> None:
    """See above."""
    searches, lines = HERE / "ablation_searches.jsonl", HERE / "ablation_rounds.jsonl"
    verb, *rest = sys.argv[1:]
    if verb == "search":
        known = {search["budget"] for search in load_lines(searches)}
        for budget in rest:
            if budget not in known:
                append(searches, searched(SPEC, budget))
    elif verb == "rounds":
        wanted = [s for s in load_lines(searches) if s["budget"] in rest[1:] or not rest[1:]]
        rounds(lines, wanted, SPEC, float(rest[0]) if rest else math.inf)
    else:
        ablation_table(load_lines(searches), load_lines(lines))
        print()
        cost_table(load_lines(searches), load_lines(lines))
        print()
        stage_table(load_lines(searches))


if __name__ == "__main__":
    main()
