"""What ``autockpt diagnose`` has to say: what a failed run reported, what filled its memory, and what helps."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from autockpt.schema.base import Data, Facts
from autockpt.schema.choices import Choice
from autockpt.schema.explanation import Holding
from autockpt.schema.plan import Comparison
from autockpt.schema.remedy import Alternative
from autockpt.schema.sizes import Budget

Stage = Literal["loading", "batch", "forward", "loss", "backward", "recompute", "optimizer", "evaluation", "unknown"]
"""What a program was doing: building the model, moving a batch, forward, logits and loss, backward, …."""
Backend = Literal["cuda", "hip", "xpu", "mps", "npu", "hpu", "other"]
HostKind = Literal["killed", "worker", "allocator", "shared_memory"]


class Frame(Data):
    """One line of a stack. ``code`` is its source, where the log has it."""

    file: str
    line: int = 0
    function: str = ""
    code: str = ""

    def __str__(self) -> str:
        name = self.file.replace("\\", "/").rsplit("/", 1)[-1]
        return f"{name}:{self.line} {self.function}".strip()


class Place(Data):
    """Where a program was, as far as its stack tells. Frames are those that say most, not the whole stack."""

    stage: Stage = "unknown"
    calls: tuple[str, ...] = Field(default=(), description="what the model called, outermost first: layer, mlp, …")
    model: Frame | None = Field(default=None, description="innermost frame of model code")
    user: Frame | None = Field(default=None, description="innermost frame that belongs to no installed package")


class DeviceFailure(Data):
    """An out-of-memory message of a device's allocator, in bytes; None where the message does not say."""

    backend: Backend = "cuda"
    rank: int | None = None
    device: int | None = None
    tried: int | None = Field(default=None, description="what was asked for, rounded up by the allocator")
    capacity: int | None = Field(default=None, description="what the device has; on MPS what PyTorch may take")
    free: int | None = None
    allowed: int | None = Field(default=None, description="limit set by set_per_process_memory_fraction")
    process: int | None = Field(default=None, description="this process, everything included")
    others: int | None = Field(default=None, description="other processes")
    allocated: int | None = Field(default=None, description="in tensors")
    cached: int | None = Field(default=None, description="reserved by the allocator beyond that")
    place: Place = Place()
    text: str = Field(default="", description="the message")

    @property
    def reserved(self) -> int | None:
        """What the allocator held of the device: at most all of it, where the driver moved more to the host."""
        if self.allocated is None:
            return None
        held = self.allocated + (self.cached or 0)
        return held if self.capacity is None else min(held, self.capacity)

    @property
    def overhead(self) -> int | None:
        """What the process held outside the allocator: context, kernels, communication buffers."""
        if self.process is None or self.reserved is None or self.process < self.reserved:
            return None
        return self.process - self.reserved


class HostFailure(Data):
    """The host's memory ran out, not the device's."""

    kind: HostKind
    tried: int | None = None
    rank: int | None = None
    text: str = ""


class LogReading(Data):
    """What a log tells of its last failure. ``failures``: one per rank, the one that is diagnosed first."""

    path: str
    failures: tuple[DeviceFailure, ...] = ()
    host: HostFailure | None = None
    zero_stage: int | None = Field(default=None, description="of DeepSpeed, where the log says it")
    world: int | None = Field(default=None, description="ranks of the run, where the log says it")
    total_params: int | None = Field(default=None, description="as PEFT counts them, where the log says it")
    trainable_params: int | None = None
    can_expand: bool = Field(default=True, description="the allocator's segments can expand there: not on Windows")
    count: int = Field(default=0, description="out-of-memory messages in the part of the log that was read")
    notes: tuple[str, ...] = ()


class Room(Data):
    """The memory that a plan may use, in bytes, and how that is known."""

    budget: int
    hardware: str
    capacity: int
    overhead: int
    others: int = 0
    said: str = Field(description="where these figures come from, in words")

    @property
    def for_plans(self) -> Budget:
        """What plans are held against: nothing is measured, so some of it is left free."""
        text = f"{self.budget // 2**20}MiB"
        return Budget(text=text, kind="bytes", size=self.budget).with_headroom(None, simulated=True)


class Tensor(Data):
    """A tensor of the simulated step."""

    made_by: str
    where: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    bytes: int


class Agreement(Data):
    """The simulated step against what the run reported."""

    simulated_peak: int = Field(description="allocated and context")
    simulated_reserved: int | None = Field(default=None, description="reserved, context and margin, as promises count")
    overflows: bool
    stage: Stage | None = Field(default=None, description="where the simulated step runs over; None where it does not")
    place: str = ""
    asked: tuple[Tensor, ...] = Field(default=(), description="tensors of the size whose allocation failed")
    verdicts: tuple[str, ...] = Field(default=(), description="what agrees and what does not, in words")


class Diagnosis(Data):
    """The whole answer. Bytes of holdings, rows and alternatives are simulated, those of the log reported."""

    model: str | None = None
    settings: Facts = Field(default_factory=dict)
    log: LogReading
    verdict: str = Field(default="", description="what happened, in a sentence")
    room: Room | None = None
    holdings: tuple[Holding, ...] = Field(default=(), description="of the simulated step where it runs over")
    agreement: Agreement | None = None
    rows: tuple[Comparison, ...] = Field(default=(), description="well-known plans and ours, simulated")
    choices: dict[str, Choice] = Field(default_factory=dict, description="the plan that is prescribed")
    plan_path: Path | None = None
    step_note: str = Field(default="", description="known error of simulated steps, and what they leave out")
    fits_already: bool = Field(default=False, description="saving everything fits, by the simulation")
    smallest_peak: int | None = None
    alternatives: tuple[Alternative, ...] = ()
    unprescribed: str = Field(default="", description="why nothing could be simulated")
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
