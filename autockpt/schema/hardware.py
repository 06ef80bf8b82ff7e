"""A device by its figures: what a step's seconds are modelled from where the device is not at hand.

Rates are dense peaks (no sparsity), in FLOP/s with a fused multiply-add as two; bandwidths in bytes per second, sizes
in bytes, times in seconds. ``efficiency`` says which share of each peak real kernels reach.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from autockpt.errors import UsageError
from autockpt.schema.base import Data
from autockpt.schema.device import WITHOUT_STREAMS, Environment
from autockpt.schema.sizes import parse_size

HardwareKind = Literal["cuda", "rocm", "mps", "cpu"]
KINDS: tuple[str, ...] = get_args(HardwareKind)
MATRIX_DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16")

# What any device of the last twenty years lies between; outside, a unit was most likely mistaken.
_RATE = (1e9, 1e17, "FLOP/s")
_SMALLEST_MEMORY, _LARGEST_MEMORY = 2**26, 2**48


def _size(value: Any) -> Any:
    """Sizes may be written with their unit: 24GiB."""
    if not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except UsageError as error:
        raise ValueError(f"{error.message}; {error.remedy}") from None


Bytes = Annotated[int, BeforeValidator(_size)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Rate = Annotated[Finite, AfterValidator(lambda value: _within(value, *_RATE))]
Bandwidth = Annotated[Finite, AfterValidator(lambda value: _within(value, 1e9, 1e15, "bytes/s"))]
Link = Annotated[Finite, AfterValidator(lambda value: _within(value, 1e7, 1e14, "bytes/s"))]


class Efficiency(Data):
    """Shares of the peaks that kernels reach, and how products of small matrices fall short of them.

    A product takes ``matrix_seconds`` and then its FLOPs at ``matrix`` times the peak, divided by
    ``d / (d + half_size)`` for its smallest dimension of ``d`` elements. ``matrix_of`` takes the place of ``matrix``
    where a dtype reaches another share: on many cards fp32 does, which runs on the vector units.
    """

    matrix: Share = Field(description="of the matrix rate: products of large matrices")
    matrix_of: dict[str, Share] | None = Field(default=None, description="by dtype, where it differs from matrix")
    attention: Share = Field(default=0.5, description="of the matrix rate: fused attention, forward")
    attention_backward: Share = Field(default=0.4, description="of the matrix rate: fused attention, backward")
    bandwidth: Share = Field(description="of the memory bandwidth: elementwise kernels on large tensors")
    link: Share = Field(description="of the link: copies of the size of an activation")
    half_size: float = Field(default=0.0, ge=0, le=65536, allow_inf_nan=False)
    matrix_seconds: float = Field(default=0.0, ge=0, le=1e-3, allow_inf_nan=False)

    @field_validator("matrix_of")
    @classmethod
    def _known_dtypes(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for name in value or {}:
            _known_dtype(name)
        return value

    def of_matrix(self, dtype: str) -> float:
        """Share of the matrix rate that products of large matrices of this type reach."""
        return (self.matrix_of or {}).get(dtype, self.matrix)


def _possible_memory(value: int) -> int:
    if not _SMALLEST_MEMORY <= value <= _LARGEST_MEMORY:
        raise ValueError(f"{value} bytes is not what a device has; write a size with its unit, such as 24GiB")
    return value


def _possible_elements(value: dict[str, float]) -> dict[str, float]:
    for name, rate in value.items():
        if not 1e3 <= rate <= 1e15:
            raise ValueError(f"{name}: {rate:g} elements per second are impossible; a CPU core does 1e6 to 1e10")
    return value


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
    memory_bytes: Annotated[Bytes, AfterValidator(_possible_memory)] = Field(description="what the device has")
    context_bytes: Bytes = Field(description="what driver, context and loaded kernels hold of it, per process")
    vector_flops: Rate = Field(description="fp32 outside of matrix units")
    matrix_flops: dict[str, Finite] = Field(description="by dtype: float32, tf32, bfloat16, float16, float64")
    bandwidth: Bandwidth = Field(description="of device memory")
    launch_seconds: Finite = Field(description="host time per op: Python, autograd, dispatcher, launch")
    region_seconds: float | None = Field(
        default=None,
        ge=0,
        le=1e-1,
        description="host time of running a region again, its ops aside; default: as 100 ops",
    )
    kernel_seconds: float = Field(default=0.0, ge=0, le=1e-3, description="least time of a kernel on the device")
    cache_bytes: Bytes = Field(default=0, description="last-level cache, where ops find what those before them wrote")
    cache_bandwidth: Bandwidth | None = Field(default=None, description="where all that an op touches fits into it")
    element_rates: Annotated[dict[str, Finite], AfterValidator(_possible_elements)] = Field(
        default_factory=dict,
        description="elements per second of kernels that neither FLOPs nor bytes explain, by op: tanh, bernoulli_, …",
    )
    link_out: Link = Field(description="device to host, pinned; on a CPU into a memory-mapped file")
    link_in: Link = Field(description="host to device, likewise")
    pageable_out: Link | None = Field(default=None, description="device to host, memory that is not pinned")
    pageable_in: Link | None = None
    unified_memory: bool = False
    efficiency: Efficiency
    sources: dict[str, str] = Field(default_factory=dict, description="by figure: where it is from")
    environment: Environment | None = Field(default=None, description="of a calibrated file: where it was measured")
    measured: str | None = Field(default=None, description="date of the calibration, yyyy-mm-dd")

    @model_validator(mode="after")
    def _known_kind(self) -> Hardware:
        """Where PyTorch itself has named the kind, it may be any accelerator's."""
        measured_on = self.environment.device.kind if self.environment is not None else None
        if self.kind not in (*KINDS, measured_on):
            raise ValueError(f"unknown kind {self.kind!r}; known are {', '.join(KINDS)}, others have to be calibrated")
        return self

    @field_validator("capability")
    @classmethod
    def _possible_capability(cls, value: tuple[int, int] | None, info: ValidationInfo) -> tuple[int, int] | None:
        if value is None:
            return None
        if info.data.get("kind") not in ("cuda", "rocm"):
            raise ValueError("only GPUs of kind cuda or rocm have a compute capability; leave it out")
        if not (3 <= value[0] <= 30 and 0 <= value[1] <= 9):
            raise ValueError(f"no GPU has compute capability {value[0]}.{value[1]}; write 8.9 as [8, 9]")
        return value

    @field_validator("context_bytes", "cache_bytes")
    @classmethod
    def _possible_part(cls, value: int, info: ValidationInfo) -> int:
        memory = info.data.get("memory_bytes")
        if value < 0 or (memory is not None and value >= memory):
            what, size = {"cache_bytes": ("cache has", "40MiB")}.get(str(info.field_name), ("context takes", "500MiB"))
            raise ValueError(f"a {what} 0 bytes or more, and less than memory_bytes; write it as {size}")
        return value

    @field_validator("link_out", "link_in", "pageable_out", "pageable_in")
    @classmethod
    def _possible_link(cls, value: float | None, info: ValidationInfo) -> float | None:
        memory = info.data.get("bandwidth")
        on_gpu = info.data.get("kind") in ("cuda", "rocm")
        if value is not None and memory is not None and on_gpu and value > memory:
            raise ValueError("no link is faster than the device's own memory (bandwidth); correct one of the two")
        return value

    @field_validator("matrix_flops")
    @classmethod
    def _possible_matrix(cls, value: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        for name, rate in value.items():
            _known_dtype(name)
            try:
                _within(rate, *_RATE)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        if "float32" not in value:
            raise ValueError("the rate for float32 is missing; add a line float32: …")
        _ordered(value, info.data.get("vector_flops"), info.data.get("kind"))
        return value

    @field_validator("launch_seconds")
    @classmethod
    def _possible_launch(cls, value: float) -> float:
        if not 1e-8 <= value <= 1e-2:
            hint = f"; did you mean {value:g}e-6?" if 0.01 < value <= 1000 else ", such as 8.0e-6"
            raise ValueError(f"launching an op takes between 10 ns and 10 ms, in seconds{hint}")
        return value

    @field_validator("cache_bandwidth")
    @classmethod
    def _possible_cache_rate(cls, value: float | None, info: ValidationInfo) -> float | None:
        memory = info.data.get("bandwidth")
        if value is not None and memory is not None and value < memory:
            raise ValueError(f"{value:g} bytes/s is below the bandwidth of the memory behind the cache ({memory:g})")
        return value

    @field_validator("sources")
    @classmethod
    def _known_figures(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name.partition(".")[0] not in cls.model_fields:
                raise ValueError(f"{name!r} is no figure of a hardware description; correct its spelling")
        return value

    @property
    def caches(self) -> bool:
        """Whether PyTorch's allocator there keeps what is freed, in segments. Taken to follow CUDA's rules."""
        return self.kind not in WITHOUT_STREAMS


def _known_dtype(name: str) -> None:
    if name not in MATRIX_DTYPES:
        raise ValueError(f"unknown dtype {name!r}; known are {', '.join(MATRIX_DTYPES)}")


def _within(value: float, low: float, high: float, unit: str) -> float:
    """The rate itself, or a ValueError that guesses which unit was meant."""
    if low <= value <= high:
        return value
    if value <= 0:
        raise ValueError(f"{value:g} {unit} is impossible; it must be above zero")
    if value > high:
        raise ValueError(f"{value:g} {unit} is more than any device does; write it in {unit}")
    scale = next((s for s in ("e9", "e12") if low * 10 <= float(f"{value:g}{s}") <= high), None)
    hint = f"; did you mean {value:g}{scale}?" if scale else ""
    raise ValueError(f"{value:g} {unit} is less than any device does{hint}")


def _ordered(matrix: dict[str, float], vector: float | None, kind: str | None) -> None:
    """A product can always run on the vector units, and on a GPU no narrower type is slower than a wider one."""
    if vector is not None and matrix["float32"] < 0.99 * vector:
        raise ValueError(
            f"float32: {matrix['float32']:g} FLOP/s is below vector_flops ({vector:g}), which a matrix product can "
            "always use; correct one of the two"
        )
    if kind not in ("cuda", "rocm", "mps"):  # a CPU without instructions for a 16-bit type emulates it
        return
    for name in ("tf32", "bfloat16", "float16"):
        if name in matrix and matrix[name] < 0.99 * matrix["float32"]:
            raise ValueError(
                f"{name}: {matrix[name]:g} FLOP/s is below float32 ({matrix['float32']:g}); correct it, or leave out "
                "a type that the device has no instructions for"
            )


def dump_hardware(hardware: Hardware) -> str:
    """A description as the text of a YAML file, without the name (which is the file's) and what was left out."""
    data = hardware.model_dump(mode="json", exclude={"name"}, exclude_none=True)
    kept = {key: value for key, value in data.items() if value is not False and value not in ("", {})}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=120)
