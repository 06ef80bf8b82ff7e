"""A hardware description: the figures from which the time and memory of a step on a card are simulated.

Rates are dense peaks (no sparsity), in FLOP/s with a fused multiply-add as two; bandwidths in bytes per second, sizes
in bytes, times in seconds. ``efficiency`` says which share of each peak real kernels reach.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from autockpt.schema.base import Data, validating
from autockpt.schema.device import WITHOUT_STREAMS, Environment
from autockpt.schema.sizes import parse_size

HardwareKind = Literal["cuda", "rocm", "mps", "cpu"]
KINDS: tuple[str, ...] = get_args(HardwareKind)
MatrixDtype = Annotated[str, Field(pattern="^(float64|float32|tf32|bfloat16|float16)$")]


_written = BeforeValidator(validating(lambda value: parse_size(value) if isinstance(value, str) else value))  # 24GiB
# Bounds are what any device of the last twenty years lies between: outside, a unit was most likely mistaken.
Bytes = Annotated[int, _written, Field(ge=0)]
Memory = Annotated[int, _written, Field(ge=2**26, le=2**48)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=1e9, le=1e17, allow_inf_nan=False)]  # FLOP/s
Bandwidth = Annotated[float, Field(ge=1e9, le=1e15, allow_inf_nan=False)]
Link = Annotated[float, Field(ge=1e7, le=1e14, allow_inf_nan=False)]
HalfSize = Annotated[float, Field(ge=0, le=65536, allow_inf_nan=False)]
Elements = Annotated[float, Field(ge=1e3, le=1e15, allow_inf_nan=False)]


class Efficiency(Data):
    """Shares of the peaks that kernels reach, and how products of small matrices fall short of them.

    A product takes ``matrix_seconds`` and then its FLOPs at ``matrix`` times the peak, divided by
    ``d / (d + half_size)`` for its smallest dimension of ``d`` elements. ``matrix_of`` takes the place of ``matrix``
    where a dtype reaches another share: on many cards fp32 does, which runs on the vector units. Products in 16 bits
    reach ``sustained`` of that within whole steps, whose power and clocks are not those of a product alone.
    """

    matrix: Share = Field(description="of the matrix rate: products of large matrices")
    matrix_of: dict[MatrixDtype, Share] | None = Field(default=None, description="by dtype, where not as matrix")
    attention: Share = Field(default=0.5, description="of the matrix rate: fused attention, forward")
    attention_backward: Share = Field(default=0.4, description="of the matrix rate: fused attention, backward")
    bandwidth: Share = Field(description="of the memory bandwidth: elementwise kernels on large tensors")
    link: Share = Field(description="of the link: copies of the size of an activation")
    half_size: HalfSize = 0.0
    half_size_of: dict[MatrixDtype, HalfSize] | None = Field(default=None, description="by dtype, where not half_size")
    sustained: Share = Field(default=1.0, description="of the rate of products alone: 16-bit products in a whole step")
    matrix_seconds: float = Field(default=0.0, ge=0, le=1e-3, allow_inf_nan=False)

    def of_matrix(self, dtype: str, smallest: int | None = None) -> float:
        """Share of the matrix rate that products of this type reach in a step, by the smallest of their dimensions."""
        share = (self.matrix_of or {}).get(dtype, self.matrix)
        half = (self.half_size_of or {}).get(dtype, self.half_size)
        small = smallest / (smallest + half) if smallest else 1.0
        return share * small * (self.sustained if dtype in ("bfloat16", "float16") else 1.0)


class HostLink(Data):
    """What the GPUs of one host share on the way to its memory: a switch, or the memory itself."""

    bandwidth: Link = Field(description="in one direction, of all copies together, as measured")
    shared_by: int = Field(ge=2, le=64, description="GPUs behind it")


class Hardware(Data):
    """A device, as its data sheet or a measurement has it.

    Where ``unified_memory`` is true host and device share ``memory_bytes``: moving activations to the host frees
    nothing. ``sources`` says for each figure where it is from: an address and what was read there, or a measurement;
    what begins with "assumption" is one, and for what begins with "not confirmed" no document was found.
    """

    name: str = Field(min_length=1)
    description: str = ""
    kind: HardwareKind | str = Field(description="cuda, rocm, mps or cpu; of a calibrated file what PyTorch calls it")
    capability: tuple[int, int] | None = Field(
        default=None,
        description="compute capability of an NVIDIA GPU, [8, 9]; of an AMD GPU what PyTorch tells: [9, 4] for gfx942",
    )
    memory_bytes: Memory = Field(description="what the device has")
    context_bytes: Bytes = Field(description="what driver, context and loaded kernels hold of it, per process")
    vector_flops: Rate = Field(description="fp32 outside of matrix units")
    matrix_flops: dict[MatrixDtype, Rate] = Field(description="by dtype: float32, tf32, bfloat16, float16, float64")
    bandwidth: Bandwidth = Field(description="of device memory")
    launch_seconds: float = Field(ge=1e-8, le=1e-2, description="host time per op: Python, autograd, launch; 8.0e-6")
    region_seconds: float | None = Field(
        default=None, ge=0, le=0.1, description="host time of running a region again besides its ops; default: 100 ops'"
    )
    kernel_seconds: float = Field(default=0.0, ge=0, le=1e-3, description="least time of a kernel on the device")
    cache_bytes: Bytes = Field(default=0, description="last-level cache, where ops find what those before them wrote")
    cache_bandwidth: Bandwidth | None = Field(default=None, description="where all that an op touches fits into it")
    element_rates: dict[str, Elements] = Field(
        default_factory=dict,
        description="elements per second of kernels that neither FLOPs nor bytes explain, by op: tanh, bernoulli_, …",
    )
    link_out: Link = Field(description="device to host, pinned; on a CPU into a memory-mapped file")
    link_in: Link = Field(description="host to device, likewise")
    host_link: HostLink | None = Field(default=None, description="what it shares with others on the way to the host")
    peer_bandwidth: Link | None = Field(
        default=None, description="to the other GPUs of a machine together, in one direction; default: that of the host"
    )
    peer_seconds: float = Field(default=2.0e-5, ge=0, le=0.1, description="least time of a collective; an assumption")
    unified_memory: bool = False
    efficiency: Efficiency
    sources: dict[str, str] = Field(default_factory=dict, description="by figure: where it is from")
    environment: Environment | None = Field(default=None, description="of a calibrated file: where it was measured")
    measured: str | None = Field(default=None, description="date of the calibration, yyyy-mm-dd")

    @model_validator(mode="after")
    def _makes_sense(self) -> Hardware:
        """Where PyTorch itself has named the kind, it may be any accelerator's."""
        measured_on = self.environment.device.kind if self.environment is not None else None
        if self.kind not in (*KINDS, measured_on):
            raise ValueError(f"kind {self.kind!r} is not known ({', '.join(KINDS)}); others have to be calibrated")
        if self.context_bytes >= self.memory_bytes:
            raise ValueError("context_bytes must be less than memory_bytes")
        if self.capability is not None and not (self.kind in ("cuda", "rocm") and 3 <= self.capability[0] <= 30):
            raise ValueError("capability is that of a GPU of kind cuda or rocm: write 8.9 as [8, 9]")
        if self.matrix_flops.get("float32", 0.0) < 0.99 * self.vector_flops:
            raise ValueError("matrix_flops must give float32 a rate, which is vector_flops at least")
        if self.kind in ("cuda", "rocm") and max(self.link_out, self.link_in) > self.bandwidth:
            raise ValueError("bandwidth, of the device's own memory, must be above that of the link")
        return self

    @property
    def caches(self) -> bool:
        """Whether PyTorch's allocator there keeps what is freed, in segments. Taken to follow CUDA's rules."""
        return self.kind not in WITHOUT_STREAMS
