"""The request to a search, the interface for its progress, and the answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from autockpt.schema.base import Command, Data, Facts
from autockpt.schema.choices import SearchSpace
from autockpt.schema.device import DeviceInfo, Environment
from autockpt.schema.hardware import Hardware
from autockpt.schema.lengths import Lengths
from autockpt.schema.plan import Comparison, CompileMode, Plan, PlanStatus
from autockpt.schema.sizes import Budget, ResolvedBudget
from autockpt.schema.trial import Measurement, Prediction, Trial
from autockpt.schema.workload import SEEDS, Stage, WorkloadSpec

_VERSIONS = ("autockpt", "torch", "transformers")
_NO_FIGURES = {"description", "sources", "environment", "measured"}  # a simulation does not depend on them
TRIALS = 40
"""The default number of candidates."""


class SearchRequest(Data):
    """A request to a search: the training step, the budget, the choices, how long to search, and where to write.

    The step is described by a ``workload``, or is a live ``step`` of this process. ``timeout`` is in seconds, the whole
    search included. ``out`` is the folder that gets the run's directory; None keeps nothing on disk.
    """

    budget: Budget
    space: SearchSpace = Field(default_factory=SearchSpace)
    workload: WorkloadSpec | None = None
    step: Any = Field(default=None, exclude=True, repr=False, description="a live autockpt.Step, without a workload")
    others_wait: bool = Field(default=False, description="one of several processes, whose step needs none of the rest")
    compile: CompileMode | None = Field(default=None, description="measure compiled steps")
    device: str | None = Field(default=None, description="cpu, cuda, cuda:1, xpu, …; None: the best there is")
    hardware: Hardware | None = Field(default=None, description="simulate this device; nothing is measured")
    simulate: bool = Field(default=False, description="take no step: bytes and seconds by ghost runs and op times")
    host_budget: int | None = Field(default=None, gt=0, description="bytes that offloading may claim on the host")
    trials: int = Field(
        default=TRIALS, gt=0, description="candidates at most; baselines and simple plans are measured besides"
    )
    timeout: float | None = Field(default=None, gt=0)
    training_steps: int | None = Field(
        default=None, ge=0, description="of the training that waits: the search takes at most a tenth of their time"
    )
    seed: int = Field(default=0, ge=0, lt=SEEDS)
    rows_per_update: int | None = Field(default=None, description="find the micro-batch for so many rows, too")
    lengths: Lengths | None = Field(default=None, description="find sets of choices for sequences of these lengths")
    longest: bool = Field(default=False, description="with the longest sequences that fit")
    out: Path | None = None
    plan_out: Path | None = Field(default=None, description="write the plan here as well")
    storage: str | None = Field(
        default=None,
        exclude=True,  # it may hold a password
        repr=False,
        description="URL of the Optuna storage; None: sqlite in the directory",
    )
    start: Plan | None = Field(
        default=None, description="an earlier plan, tried early; its cost coefficients are not reused"
    )
    allow_inexact: bool = Field(default=False, description="choices whose gradients are equal up to rounding, too")
    alternatives: bool = Field(default=True, description="look for changes that would fit where nothing does")
    wait: bool = Field(default=True, description="until other searches have measured on the device; else DeviceBusy")
    fresh: bool = Field(default=False, description="set an earlier run of this question aside")
    command: Command = Field(default=(), description="the command line")
    notes: tuple[str, ...] = Field(default=(), description="decided for the user, to be repeated with the answer")

    @property
    def spec(self) -> WorkloadSpec | None:
        """The description of the step; None for a live step without one."""
        return self.workload or self.step.spec

    @property
    def name(self) -> str:
        """The model's name."""
        return self.spec.model if self.spec is not None else type(self.step.model).__name__

    @property
    def described(self) -> WorkloadSpec:
        """The workload, where the request cannot be about a live step."""
        assert self.workload is not None
        return self.workload

    @property
    def measures(self) -> bool:
        """Whether candidates take real steps; else ghost runs and op times simulate them.

        A simulation tries a single candidate: the solver plans with the very costs that it simulates, so nothing can be
        learned from the result.
        """
        return self.hardware is None and not self.simulate

    @property
    def all_stages(self) -> bool:
        """Whether plans for all stages of a pipeline are asked for."""
        stage = self.workload and self.workload.stage
        return bool(stage) and Stage.parse(stage).number is None

    @property
    def ignores_record(self) -> bool:
        """Whether the recorded answer of an earlier search is not used: by request, or to try a plan to start from."""
        return self.fresh or self.start is not None

    def question(self, environment: Environment | None = None, **more: Any) -> dict[str, Any]:
        """All that changes the answer, as JSON. Runs of one question share a directory and continue one another.

        Time limits and output are not part of it. ``more`` adds facts from tracing, such as the fingerprint of the
        model's structure, and those that identify a live step. Without ``environment`` any device is meant.
        """
        whole = self.budget.kind == "auto"  # the device's capacity counts for such a budget alone
        of_a_run = {"overhead_bytes"} if whole else {"overhead_bytes", "capacity_bytes"}
        asked: dict[str, Any] = {
            "space": self.space.model_dump(mode="json"),
            "budget": self.budget.text,
            "headroom": self.budget.headroom or None,
            "seed": self.seed,
            "allow_inexact": self.allow_inexact or None,
            "host_budget": self.host_budget,
            "workload": self.spec and self.spec.model_dump(mode="json"),
            "files": (self.spec and self.spec.files) or None,
            "compile": self.compile,
            "simulate": self.simulate or None,
            "hardware": self.hardware and self.hardware.model_dump(mode="json", exclude=_NO_FIGURES),
            **more,
        }
        if environment is not None:
            asked["device"] = environment.device.model_dump(mode="json", exclude=of_a_run)
            asked["versions"] = {k: v for k, v in environment.versions.items() if k in _VERSIONS}
        return {name: value for name, value in asked.items() if value is not None}


def question_hash(question: Mapping[str, Any]) -> str:
    """Eight hex digits that identify a question."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:8]


class SearchOutcome(Data, extra="ignore"):  # one that an earlier version recorded may hold more
    """The answer of a search.

    ``plan`` is None only where the search was interrupted before anything fitting was found. ``source`` says whether
    the numbers are measured or simulated. ``binding`` is False where saving everything fits, so that there is nothing
    to gain. ``smallest_peak`` is the least reachable peak in bytes.
    """

    plan: Plan | None
    source: PlanStatus = "measured"
    budget: ResolvedBudget
    device: DeviceInfo
    rows: tuple[Comparison, ...] = Field(default=(), description="none, recompute all, …; ours last")
    settings: Facts = Field(default_factory=dict)
    binding: bool = True
    interrupted: bool = False
    resumed: int = Field(default=0, description="trials taken over from earlier runs of this question")
    measured_trials: int = Field(default=0, description="with those of earlier runs; simulated ones where `source` is")
    stopped: str = Field(default="", description="why the search ended, in words")
    run_directory: Path | None = None
    plan_path: Path | None = Field(default=None, description="where to load the plan from")
    set_aside: Path | None = Field(default=None, description="where an earlier, different plan file was moved to")
    smallest_peak: int | None = None
    step_note: str = Field(default="", description="known error of simulated steps, and what they leave out")
    seconds: float = Field(default=0.0, description="wall time of the search")
    notes: tuple[str, ...] = ()


class FinishedSearch(Data):
    """The outcome of a finished search, and the limits that it had."""

    trials: int
    timeout: float | None = None
    training_steps: int | None = None
    outcome: SearchOutcome

    def answers(self, asked: SearchRequest) -> bool:
        """Whether a search with the limits of ``asked`` would also have ended by now."""
        limits = (self.timeout, asked.timeout), (self.training_steps, asked.training_steps)
        longer = any(had is not None and (now is None or now > had) for had, now in limits)
        return asked.trials <= self.trials and not (longer and "time limit" in self.outcome.stopped)


class BatchSetting(Data):
    """A micro-batch size × accumulation for given rows per optimizer update, and the best plan for it.

    ``score`` is a measurement, or the prediction of a simulated search; its seconds are those of a whole update.
    """

    batch_size: int
    accumulate: int
    plan: str = Field(description="what the layers do, in words")
    score: Measurement | Prediction
    work: float = Field(description="tokens of an update; rows, where the batch holds no tokens")

    @property
    def update_seconds(self) -> float:
        """Seconds of one optimizer update."""
        assert self.score.step_seconds is not None
        return self.score.step_seconds

    @property
    def per_second(self) -> float:
        """Tokens (or rows) per second."""
        return self.work / self.update_seconds


class BatchAnswer(Data):
    """The most tokens per second for a number of rows per update: the best setting, its search, and the others."""

    rows_per_update: int
    unit: Literal["tokens", "rows"]
    best: BatchSetting
    others: tuple[BatchSetting, ...] = ()
    outcome: SearchOutcome
    trials: int = Field(description="of all sizes together, baselines among them, as outcomes count them")
    seconds: float = Field(description="wall time of it all")
    notes: tuple[str, ...] = ()


class StagePlan(Data):
    """A stage of a pipeline, its search, and the plan for it: the leanest that is no slower than the slowest stage."""

    stage: str = Field(description="as in a job file: 1/4")
    layers: int
    plan: Plan
    path: Path | None = Field(default=None, description="where to load the plan from")
    outcome: SearchOutcome

    @property
    def score(self) -> Measurement | Prediction:
        """What the plan was measured, or simulated, to do."""
        score = self.plan.measured or self.plan.predicted
        assert score is not None
        return score


class PipelineAnswer(Data):
    """A plan for each stage of a pipeline. ``faster_cut`` are layers by stage that balance better, by ghost runs, and
    ``cut_seconds`` what the slowest stage would then take."""

    stages: tuple[StagePlan, ...]
    faster_cut: tuple[int, ...] = ()
    cut_seconds: float | None = None

    @property
    def slowest(self) -> StagePlan:
        """The stage whose step all others wait for."""
        return max(self.stages, key=lambda stage: stage.score.step_seconds or 0.0)


class Listener(Protocol):
    """The interface for a search's progress. Calls come from one thread, in order; none may raise."""

    def stage(self, name: str, total: int | None = None) -> None:
        """A stage begins, and the one before it has ended: "trace", "profile", …; of ``total`` steps if known."""

    def advance(self, steps: int = 1) -> None:
        """So many steps of the current stage have ended."""

    def trial(self, trial: Trial, best: Trial | None) -> None:
        """A trial ended; ``best`` is the best feasible one so far, perhaps this one. Advances the stage by one."""

    def note(self, text: str) -> None:
        """Something the user should know now."""


class Silence(Listener):
    """A listener that ignores everything."""


class Estimate(Data):
    """A simulated answer: whether a training step fits a card, with what plan, and how fast. Nothing was measured.

    ``lora`` None stands for training all weights. Without a fit ``smallest_peak`` is the least that any of the plans
    needs; ``note`` says why there is no answer at all. Bytes and seconds grow with batch and length, or ``remark``
    names the row that they do not go with, and why.
    """

    model: str
    card: str
    batch_size: int | None = Field(description="None: of a live step whose batch has no rows")
    seq_len: int | None = Field(description="None: of a step without tokens")
    lora: int | None = Field(default=None, description="rank of LoRA adapters")
    load_in_4bit: bool = Field(default=False, description="the adapters' base is quantised: QLoRA")
    fits: bool
    peak_bytes: int | None = None
    step_seconds: float | None = None
    choices: dict[str, int] = Field(default_factory=dict, description="how many units do what; the others save")
    smallest_peak: int | None = Field(default=None, description="bytes of the leanest plan")
    note: str = ""
    remark: str = Field(default="", description="why it needs less than a smaller job, or more than a larger one")
    simulated: bool = True
    step_note: str = Field(default="", description="known error of simulated steps, and what they leave out")
