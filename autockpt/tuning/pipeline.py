"""Plans for all stages of a pipeline: a search for each, and a better balance of layers between them.

Stages are independent jobs, and the slowest one determines the step time of the pipeline. So every other stage gets the
leanest plan that is no slower. Another number of layers for a stage is predicted from its menu, as the seconds and
bytes of layers add up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from autockpt.errors import AutockptError, UsageError
from autockpt.schema import Listener, Plan, SearchOutcome, SearchRequest, Trial, plan_hash
from autockpt.schema.profile import Menu
from autockpt.schema.request import PipelineAnswer, StagePlan
from autockpt.schema.run_directory import RunDirectory, plan_of_trial
from autockpt.schema.workload import Stage
from autockpt.tuning.clock import Clock
from autockpt.tuning.search import run_search
from autockpt.tuning.trials import peak_of_trial

PLAN_OF_STAGE = "plan_of_stage.yaml"
WORTH = 0.01
"""Share of the slowest stage's step that another cut must gain to be suggested."""
Seconds = Callable[[int], float]
"""Predicts step seconds of a stage from its number of layers; infinite where they do not fit."""


def search_stages(request: SearchRequest, listener: Listener) -> PipelineAnswer:
    """A plan for each stage of ``request.workload.stage``, all within one budget; each stage has a run of its own.

    Plans are also written where ``request.plan_out`` says, with the stage's number. Without runs (``out``)
    stages keep their fastest plans. Raises what ``run_search`` raises, with the stage named, and UsageError for other
    questions at the same time; KeyboardInterrupt after Ctrl-C.
    """
    if request.rows_per_update is not None or request.lengths is not None or request.longest:
        raise UsageError(
            "a micro-batch or lengths are not looked for in all stages of a pipeline",
            remedy="Name the batch size and the length instead, or plan one stage.",
        )
    spec, clock = request.described, Clock(listener, request.timeout)
    stages, outcomes = Stage.parse(spec.stage or "").single(), list[SearchOutcome]()
    for stage in stages:
        listener.note(f"stage {stage}")
        left = clock.timeout_of(1 / (len(stages) - len(outcomes)))
        asked = {"workload": spec.model_copy(update={"stage": stage}), "plan_out": None, "timeout": left}
        try:
            outcomes.append(run_search(request.model_copy(update=asked), listener))
        except AutockptError as error:
            error.message = f"stage {stage}: {error.message}"
            raise
        if outcomes[-1].plan is None or outcomes[-1].interrupted:  # its run keeps what was tried
            raise KeyboardInterrupt
    runs = [None if one.run_directory is None else RunDirectory.open(one.run_directory) for one in outcomes]
    slowest = max(_seconds(one) for one in outcomes)
    found = []
    for stage, outcome, run in zip(stages, outcomes, runs, strict=True):
        plan, path = outcome.plan, outcome.plan_path
        assert plan is not None
        if run is not None and (lean := _leanest(run, outcome, slowest)) is not None:
            plan, path = lean, run.path / PLAN_OF_STAGE
            plan.save(path, replace=True)
        if request.plan_out is not None:
            path = request.plan_out.with_stem(f"{request.plan_out.stem}_{len(found)}")
            plan.save(path)
        layers = len([name for name in plan.expand_planned() if name != plan.head])
        found.append(StagePlan(stage=stage, layers=layers, plan=plan, path=path, outcome=outcome))
    answer = PipelineAnswer(stages=tuple(found))
    by_layers = [_by_layers(run, one) for run, one in zip(runs, outcomes, strict=True) if run is not None]
    known = [seconds for seconds in by_layers if seconds is not None]
    if len(known) < len(found):
        return answer
    cut = balanced(known, sum(stage.layers for stage in found))
    longest = max(seconds(layers) for seconds, layers in zip(known, cut, strict=True))
    gains = longest < (1 - WORTH) * slowest
    return answer.model_copy(update={"faster_cut": cut, "cut_seconds": longest}) if gains else answer


def balanced(stages: Sequence[Seconds], layers: int) -> tuple[int, ...]:
    """Layers of each stage that make the slowest as fast as possible: each goes where it leaves the shortest step.

    This greedy cut is optimal, as no stage is faster with more layers.
    """
    cut = [1] * len(stages)
    for _ in range(layers - len(stages)):
        cut[min(range(len(stages)), key=lambda i: stages[i](cut[i] + 1))] += 1
    return tuple(cut)


def _by_layers(run: RunDirectory, outcome: SearchOutcome) -> Seconds | None:
    """Predict a stage's seconds from its number of layers, by its plan and by the costs of one layer.

    A layer holds weights, gradients and optimizer states as its share of the weights, and what its choice keeps for all
    micro-batches in flight. None where the plan's choices have no known costs.
    """
    profile, graph, plan = run.profile(), run.graph(), outcome.plan
    if profile is None or graph is None or plan is None:
        return None
    blocks, choices = list(graph.blocks()), plan.expand_planned()
    menus = {menu.kind: menu for menu in profile.menus}
    ours = []
    for block in blocks:  # by the choice itself, or by its kind: an offload has a window
        own, items = choices[block.name], menus[block.kind].items
        ours += ([i for i in items if i.choice == own] or [i for i in items if i.choice.kind == own.kind])[:1]
    score = plan.measured or plan.predicted
    if len(ours) != len(blocks) or score is None or score.step_seconds is None:
        return None
    usual = menus[Counter(block.kind for block in blocks).most_common(1)[0][0]]
    weights = {s.id: s.bytes for s in graph.storages if s.kind == "weight" and s.birth < 0}
    read = {storage for op in graph.ops if op.unit == blocks[0].name for storage in op.inputs}
    share = sum(size for storage, size in weights.items() if storage in read) / max(1, sum(weights.values()))
    each = share * (graph.resident_bytes + sum(s.bytes for s in graph.storages if s.kind == "gradient"))
    rest = score.step_seconds - sum(item.seconds for item in ours)
    room = outcome.budget.bytes - score.peak_bytes + sum(item.kept_bytes for item in ours)

    def seconds(layers: int) -> float:
        return rest + layers * _cheapest(usual, (room - (layers - len(blocks)) * each) / layers)

    return seconds


def _cheapest(menu: Menu, room: float) -> float:
    """Seconds of a layer of many, which keep ``room`` bytes each on average, by at most two choices in any shares."""
    fitting = [item for item in menu.items if item.kept_bytes <= room]
    found = [item.seconds for item in fitting]
    for less in fitting:
        for more in (item for item in menu.items if item.kept_bytes > room):
            share = (room - less.kept_bytes) / (more.kept_bytes - less.kept_bytes)
            found.append(less.seconds + share * (more.seconds - less.seconds))
    return min(found, default=math.inf)


def _leanest(run: RunDirectory, outcome: SearchOutcome, most: float) -> Plan | None:
    """The leanest plan on record that takes at most so many seconds; None where that is the answer's own."""
    trials = [trial for trial in run.trials() if trial.feasible and trial.score_seconds <= most]
    outlook = run.outlook() if outcome.source == "simulated" else None
    for other in outlook.plans if outlook is not None else ():
        prediction, budget = other.predicted, outcome.budget.bytes
        if prediction.step_seconds is not None and prediction.step_seconds <= most and prediction.peak_bytes <= budget:
            plan = {"choices": other.choices, "plan_hash": plan_hash(other.choices), "predicted": prediction}
            named = {"number": len(trials), "name": "for a smaller budget", "encoding": "final"}
            trials.append(Trial(**named, **plan, state="simulated", feasible=True))
    lean = min(trials, key=lambda trial: (peak_of_trial(trial), trial.score_seconds), default=None)
    if lean is None or outcome.plan is None or lean.plan_hash == outcome.plan.hash:
        return None
    note = "The leanest plan that is no slower than the pipeline's slowest stage."
    return plan_of_trial(run, lean).model_copy(update={"notes": (note,)})


def _seconds(outcome: SearchOutcome) -> float:
    assert outcome.plan is not None
    score = outcome.plan.measured or outcome.plan.predicted
    return (score.step_seconds if score is not None else None) or 0.0
