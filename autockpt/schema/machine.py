"""What ``autockpt calibrate`` measured on a machine: raw rates, before a description is fitted to them."""

from __future__ import annotations

from pydantic import Field

from autockpt.schema.base import Data
from autockpt.schema.device import Environment


class ProductTime(Data):
    """One matrix product, (m × k) by (k × n): seconds, median of repeats."""

    dtype: str
    m: int
    k: int
    n: int
    seconds: float

    @property
    def flops(self) -> float:
        """A multiply and an add are two."""
        return 2.0 * self.m * self.k * self.n

    @property
    def bytes(self) -> float:
        """Both matrices and the result, once."""
        width = {"float64": 8, "float32": 4, "tf32": 4}.get(self.dtype, 2)
        return float(width * (self.m * self.k + self.k * self.n + self.m * self.n))


class Traffic(Data):
    """An elementwise kernel that touches ``bytes`` in all: bytes per second."""

    bytes: int
    rate: float


class ElementTime(Data):
    """One kernel by the name of its op: elements of its largest tensor, bytes it must move, seconds."""

    name: str
    elements: int
    bytes: float
    seconds: float


class Links(Data):
    """Bytes per second between device and host. ``small_*``: copies of the size of an activation; else large ones."""

    out: float
    back: float
    small_out: float
    small_back: float
    pageable_out: float | None = None
    pageable_back: float | None = None


class Machine(Data):
    """All measurements of one machine. ``kind`` as in Hardware; bytes, seconds, FLOP/s."""

    kind: str
    capability: tuple[int, int] | None = Field(default=None, description="compute capability of a GPU")
    environment: Environment
    products: tuple[ProductTime, ...] = Field(min_length=1)
    attention_flops: float = Field(description="of fused attention, forward")
    attention_backward_flops: float
    attention_dtype: str
    vector_flops: float
    traffic: tuple[Traffic, ...] = Field(min_length=1, description="by growing bytes")
    elements: tuple[ElementTime, ...] = ()
    kernel_seconds: float = Field(default=0.0, description="least time of a kernel on the device")
    launch_seconds: float = Field(description="host seconds per op of a training step with next to no arithmetic")
    region_seconds: float | None = Field(default=None, description="host seconds of a region run again, ops aside")
    watch_seconds: float | None = Field(default=None, description="host seconds of an op besides, where it is watched")
    links: Links
    memory_bytes: int
    context_bytes: int
    seconds: float = Field(default=0.0, description="that measuring took")
