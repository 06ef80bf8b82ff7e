"""One row of ``autockpt estimate``."""

from __future__ import annotations

from pydantic import Field

from autockpt.schema.base import Data


class Estimate(Data):
    """A simulated answer: whether a training step fits a card, with what plan, and how fast. Nothing was measured.

    ``lora`` None stands for training all weights. Without a fit ``smallest_peak`` is the least that any of the plans
    needs; ``note`` says why there is no answer at all.
    """

    model: str
    card: str
    batch_size: int
    seq_len: int
    lora: int | None = Field(default=None, description="rank of LoRA adapters")
    load_in_4bit: bool = Field(default=False, description="the adapters' base is quantised: QLoRA")
    fits: bool
    peak_bytes: int | None = None
    step_seconds: float | None = None
    choices: dict[str, int] = Field(default_factory=dict, description="how many units do what; the others save")
    smallest_peak: int | None = Field(default=None, description="bytes of the leanest plan")
    note: str = ""
    simulated: bool = True
