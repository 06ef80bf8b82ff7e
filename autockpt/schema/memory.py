"""The most that a step holds on a device, by who holds it."""

from __future__ import annotations

from pydantic import Field

from autockpt.schema.base import Data


class DevicePeak(Data):
    """Bytes at the worst moment of a step on a device, as modelled."""

    allocated: int = Field(description="tensors, in whole blocks of the allocator")
    reserved: int = Field(description="what the allocator took of the device for them")
    context: int = Field(default=0, description="what driver, context and kernels hold outside it")
    workspace: int = Field(default=0, description="the part of `allocated` that matrix libraries keep")
    fits: bool = Field(default=True, description="whether a run within the limit gets through")

    @property
    def fragmentation(self) -> int:
        """Reserved bytes beyond what was ever allocated."""
        return self.reserved - self.allocated

    @property
    def total(self) -> int:
        """What counts against a budget: reserved bytes and context."""
        return self.reserved + self.context
