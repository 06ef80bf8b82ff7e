"""A side-by-side of methods on one workload: what was asked, every method's readings, and who is ahead where."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from autockpt.schema.base import Command, Data, Facts
from autockpt.schema.device import Environment
from autockpt.schema.request import identity_of
from autockpt.schema.sizes import Budget, ResolvedBudget
from autockpt.schema.space import SearchSpace
from autockpt.schema.workload import WorkloadSpec

Group = Literal["eager", "compiled"]
RowState = Literal["measured", "out_of_memory", "infeasible", "failed", "missing"]
Word = Literal["faster", "slower", "undecided"]


class BenchRequest(Data):
    """One question to the bench, with how long to work on it and where to write.

    ``rounds`` is how often every method is timed; those that decide who is ahead are timed on, up to ``most_rounds``.
    ``timeout`` is in seconds and bounds the timing only: no round begins after it.
    """

    workload: WorkloadSpec
    budgets: tuple[Budget, ...]
    space: SearchSpace
    peers: tuple[str, ...] | None = Field(default=None, description="names from the table of peers; None: all")
    device: str | None = None
    rounds: int = Field(default=9, gt=0)
    most_rounds: int = Field(default=60, gt=0)
    within: float = Field(default=0.005, gt=0, description="how narrow an interval is enough, as a share of the ratio")
    timeout: float | None = Field(default=None, gt=0)
    trials: int = Field(default=20, gt=0, description="of each search for a plan of ours, at most")
    seed: int = 0
    out: Path = Path("results")
    fresh: bool = False
    command: Command = ()
    notes: tuple[str, ...] = ()

    def question(self, environment: Environment) -> dict[str, Any]:
        """All that changes the numbers, as JSON: the same question continues, with more peers or rounds if asked."""
        return identity_of(
            environment,
            self.space,
            bench=1,
            workload=self.workload.model_dump(mode="json"),
            budgets=[b.text for b in self.budgets],
            trials=self.trials,
        )


class SearchCost(Data):
    """What it took to find a plan. Wall seconds; so many of them were real steps and, where compiled, compiling."""

    trials: int
    seconds: float
    measured_seconds: float
    compile_seconds: float = 0.0


class BenchRow(Data):
    """One method in one setting. ``setting`` is what attaches it, as JSON, understood by its peer alone.

    Only rows in the state "measured" take part in the timing: their gradients were compared with plain training's.
    """

    key: str = Field(description="unique: the peer and its setting in words")
    peer: str
    group: Group = "eager"
    setting: dict[str, Any] = Field(default_factory=dict)
    state: RowState
    message: str = Field(default="", description="why there is no number, in one line")
    peak_bytes: int | None = None
    gradients: str = Field(default="", description="what the comparison with plain training said")
    first_seconds: float | None = Field(default=None, description="until its first steps were done")
    compile_seconds: float | None = Field(default=None, description="of these: compiling, where anything was")
    budget: str | None = Field(default=None, description="of a plan that was searched for: the budget as asked")
    search: SearchCost | None = None


class Ratio(Data):
    """A ratio of step times with its 95 % interval, from paired rounds. Infinite ends are written as None."""

    low: float
    value: float
    high: float | None
    rounds: int


class BenchLine(Data):
    """A row with what its rounds say. ``overhead`` is its time over that of its group's plain training."""

    row: BenchRow
    rounds: int = 0
    step_seconds: float | None = Field(default=None, description="median over rounds")
    noise: float | None = Field(default=None, description="half the median's 95 % interval as a share of it")
    overhead: Ratio | None = None


class Duel(Data):
    """Our plan against one rival that fits the same budget. ``ratio`` is our time over the rival's."""

    rival: str
    ratio: Ratio
    verdict: Word
    settled: bool = Field(description="the interval is as narrow as was asked for")


class BudgetResult(Data):
    """Who is ahead at one budget among the methods of a group whose measured peak fits it: ``peer``, a way of ours,
    against each of the others. ``duels``: the fastest first."""

    budget: ResolvedBudget
    peer: str = "autockpt"
    ours: str | None = Field(default=None, description="key of our plan's row; None: there is none that fits")
    note: str = ""
    duels: tuple[Duel, ...] = ()
    compiled: str | None = Field(default=None, description="key of the fastest compiled row that fits")


class BenchReport(Data):
    """Everything that a bench found out so far."""

    bench: int = 1
    model: str
    settings: Facts = Field(default_factory=dict)
    environment: Environment
    command: str = ""
    plain_peak_bytes: int | None = None
    lines: tuple[BenchLine, ...] = ()
    budgets: tuple[BudgetResult, ...] = ()
    within: float = 0.005
    most_rounds: int = 60
    interrupted: bool = False
    directory: Path | None = None
    notes: tuple[str, ...] = ()
