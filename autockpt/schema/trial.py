"""Predictions and measurements of plans, the trials of a search, and results of ghost runs alone."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from autockpt.schema.base import Data
from autockpt.schema.choices import Choice


class Prediction(Data):
    """The predicted peak and step time of a plan: bytes by ghost run, seconds from op times, without noise."""

    noise: ClassVar[float] = 0.0
    peak_bytes: int
    step_seconds: float | None = None
    host_bytes: int = Field(default=0, description="what offloading claims of the host, its pool's rounding included")


class Measurement(Data):
    """The result of real steps. ``step_seconds`` is the median of one whole accumulation cycle.

    ``noise`` is half the width of the median's 95 % interval as a share of it; ``steps`` the number of timed cycles.
    """

    peak_bytes: int
    step_seconds: float
    noise: float = 0.0
    steps: int = 1
    host_bytes: int = Field(default=0, description="what offloading claimed of host memory")
    allocated_bytes: int | None = Field(default=None, description="CUDA: peak allocated; peak_bytes is reserved")
    times: tuple[float, ...] = Field(default=(), description="seconds of each timed cycle, in order")
    compile_seconds: float = Field(default=0.0, description="spent on compiling before the first timed cycle")
    graphs: int = Field(default=0, description="graphs that a plan for compiled training is compiled to")
    peak_by_rank: tuple[int, ...] = Field(default=(), description="of a job of ranks; the largest is peak_bytes")
    seconds_by_rank: tuple[float, ...] = Field(default=(), description="likewise, medians; the slowest counts")
    loss_is_finite: bool = Field(default=True, description="whether its steps' loss is a number; of full steps unknown")

    def rescaled(self, factor: float) -> Measurement:
        """With all times multiplied by ``factor``; peaks and noise stand."""
        times = tuple(seconds * factor for seconds in self.times)
        return self.model_copy(update={"step_seconds": self.step_seconds * factor, "times": times})


TrialState = Literal["measured", "simulated", "out_of_memory", "over_budget", "predicted_over", "failed"]


class Trial(Data):
    """One candidate of a search, whatever proposed it.

    State "simulated": no step was taken, in a search that simulates; ``predicted`` is all there is.
    """

    number: int
    name: str = Field(description="none, recompute all, every-2, …, or a description of the plan")
    encoding: str = Field(description="baseline, seed, solver, knobs, proposed, or final")
    choices: dict[str, Choice]
    plan_hash: str
    state: TrialState
    feasible: bool | None = Field(description="None: not known, for the budget was not known in bytes yet")
    predicted: Prediction | None = None
    measured: Measurement | None = None
    parameters: dict[str, float | int | str] = Field(default_factory=dict)
    message: str = ""
    elapsed_seconds: float = Field(default=0.0, description="wall time since the search began, when this trial ended")

    @property
    def score(self) -> Measurement | Prediction | None:
        """What the trial is judged by: its measurement; in a simulated search its prediction; else nothing."""
        return self.predicted if self.state == "simulated" else self.measured

    @property
    def score_seconds(self) -> float:
        """Step seconds by ``score``; infinite where there are none."""
        return math.inf if self.score is None or self.score.step_seconds is None else self.score.step_seconds


# -- what ghost runs alone say besides: plans for other budgets, changes of the job ------------------------------------


class Alternative(Data):
    """A change of the job that fits the budget, ghost-run. Nothing of it was measured."""

    options: str = Field(description="the changed settings of the job: batch size 1, accumulate 2")
    effect: str = Field(description="what changes for the training, in words")
    plan: str = Field(description="the uniform choice that was simulated")
    peak_bytes: int = Field(description="simulated, the device's own overhead included")
    spare_bytes: int | None = Field(default=None, description="what it leaves of the budget")
    step_seconds: float | None = Field(default=None, description="simulated; None where rates are only nominal")
    relative_cost: float = Field(
        description="simulated seconds per token (or row) over those of the leanest plan of the job as it was asked for"
    )


class GhostAnswer(Data):
    """A plan and what its ghost run says. ``peak_bytes`` is the least budget that it was found to fit."""

    choices: dict[str, Choice]
    predicted: Prediction


class Outlook(Data):
    """Written when a search ends. Nothing of it was measured."""

    plans: tuple[GhostAnswer, ...] = Field(default=(), description="ghost-run by the search, trials among them")
    changes: tuple[Alternative, ...] = Field(default=(), description="what would make the job fit, where nothing fits")
    infeasible: str = Field(default="", description="why no plan was found, where nothing fits")
