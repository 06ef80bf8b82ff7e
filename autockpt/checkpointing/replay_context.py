"""What a forward runs under, and how to run it again under the same: random states, autocast, default device and dtype,
and the kernels that are allowed for attention (``torch.nn.attention.sdpa_kernel`` around a forward alone).

Python's and NumPy's generators are read only for units that were seen to draw from them: reading both takes longer than
a tiny layer's forward. Autocast remembers its casts of weights until its outermost block ends. A recomputation uses
none of these and leaves none: it may run in another block than its forward, or after an update of the weights.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from autockpt.devices.random_states import PythonStates, TorchStates
from autockpt.errors import ConflictError

# of any kind of device, for which torch has no public question
autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled  # type: ignore[attr-defined]
# the innermost transform of torch.func, of which tensors have no memory of their own; torch has no public question
current_transform: Callable[[], int | None] = torch._C._functorch.maybe_current_level  # type: ignore[attr-defined]
sequence_nr: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The number of the next autograd node that this thread makes."""
_SDPA = torch.backends.cuda  # of all devices
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (_SDPA.flash_sdp_enabled, _SDPA.enable_flash_sdp),
    (_SDPA.mem_efficient_sdp_enabled, _SDPA.enable_mem_efficient_sdp),
    (_SDPA.math_sdp_enabled, _SDPA.enable_math_sdp),
    (_SDPA.cudnn_sdp_enabled, _SDPA.enable_cudnn_sdp),
    (torch.get_default_dtype, torch.set_default_dtype),
)
_READS = [read for read, _ in _SWITCHES]
_CPU = torch.device("cpu")
_PATIENCE = 120.0  # seconds
_here = threading.local()
_lock = threading.RLock()

Accelerator = tuple[str, int]
"""A kind of accelerator, and its index."""


def accelerators_of(tensors: Iterable[torch.Tensor | None]) -> list[Accelerator]:
    """Where a forward on these tensors may draw random numbers, besides the CPU."""
    devices = [t.device for t in tensors if t is not None and not (t.is_cpu or t.is_meta)]
    return sorted({(device.type, device.index or 0) for device in devices})


class ReplayContext:
    """Made before a forward, which may draw random numbers on these ``accelerators``, by ``generators`` among its
    arguments, and with ``python`` by Python's or NumPy's generator.
    """

    __slots__ = (
        *("_accelerators", "_block", "_default_device", "_generators", "_outer", "_python", "_switches", "_torch"),
        "autocast",
    )

    def __init__(self, accelerators: list[Accelerator], generators: Sequence[torch.Generator], python: bool) -> None:
        self._accelerators = accelerators
        self._torch = TorchStates(accelerators)
        self._generators = [(generator, generator.get_state()) for generator in generators] if generators else ()
        self._python = PythonStates() if python else None
        self.autocast = AutocastState(["cpu", *{kind for kind, _ in accelerators}] if accelerators else ["cpu"])
        # where tensors are made by default: a function mode decides, and asking for it takes long
        self._default_device = torch.get_default_device() if _get_current_function_mode_stack() else _CPU
        self._switches = switches()

    def now(self) -> TorchStates:
        """PyTorch's random states at present."""
        return TorchStates(self._accelerators)

    def forget_python_unless_drawn(self) -> bool:
        """The forward has ended: whether it drew from Python's or NumPy's generator. If not, they are dropped."""
        if self._python is not None and not self._python.were_drawn_from():
            self._python = None
        return self._python is not None

    def __enter__(self) -> None:
        """As before the forward, and afterwards as now."""
        generators = [generator for generator, _ in self._generators]
        self._outer: Any = ReplayContext(self._accelerators, generators, self._python is not None)
        now = self._outer
        if self._default_device != now._default_device:
            self._default_device.__enter__()
        self._block = self.autocast.restore()
        try:
            self._restore(now)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(self, *raised: Any) -> None:
        now, self._outer = self._outer, None
        now._restore(self)
        self.autocast.undo(self._block)
        if self._default_device != now._default_device:
            self._default_device.__exit__(*raised)

    def _restore(self, now: ReplayContext) -> None:
        self._torch.restore()
        for generator, state in self._generators:
            generator.set_state(state)
        if self._python is not None:
            self._python.restore()
        set_switches(self._switches, now._switches)


class AutocastState:
    """To which types autocast casts on these kinds of devices, when this was made."""

    __slots__ = ("_kinds", "key")

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds = [kind for kind in kinds if kind == "cpu" or torch.amp.is_autocast_available(kind)]
        self.key = self._now() if autocast_is_on() else None  # None where it is off

    @property
    def enabled(self) -> bool:
        """Whether autocast was on."""
        return self.key is not None and any(enabled for _, enabled, _ in self.key[1])

    def _now(self) -> tuple[bool, tuple[tuple[str, bool, torch.dtype], ...]]:
        states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._kinds]
        return torch.is_autocast_cache_enabled(), tuple(states)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As then, and afterwards as now."""
        before = self.restore(remembers=True)
        try:
            yield
        finally:
            self.undo(before)

    def restore(self, *, remembers: bool = False) -> tuple[Any, int, bool]:
        """Set it as then; returns what ``undo`` takes. ``remembers``: a weight that is used often is cast once."""
        now, depth = self._now(), autocast_depth()
        cache, states = self.key or (now[0], tuple([(kind, False, dtype) for kind, _, dtype in now[1]]))
        # a unit's own block inside of no other remembers nothing beyond its end
        cache = cache and (remembers or (depth == 0 and not self.enabled))
        if (cache, states) != now:
            _set_autocast(cache, states)
        return now, depth, cache

    def undo(self, before: tuple[Any, int, bool]) -> None:
        """Set it as before ``restore``. A forward may enter autocast by hand (``__enter__``), and a recomputation
        that stops early misses the exit."""
        now, depth, cache = before
        if (now, depth) != (self._now(), autocast_depth()):
            _set_autocast(*now)
            for _ in range(autocast_depth(), depth):
                torch.autocast_increment_nesting()
            for _ in range(depth, autocast_depth()):
                torch.autocast_decrement_nesting()
            if depth == 0 and cache:  # as at the end of the outermost block
                torch.clear_autocast_cache()


def _set_autocast(cache: bool, states: Sequence[tuple[str, bool, torch.dtype]]) -> None:
    for kind, enabled, dtype in states:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(cache)


def autocast_depth() -> int:
    """How many blocks of autocast are around this."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def switches() -> tuple[Any, ...]:
    """Which kernels are allowed for attention now, and the default dtype."""
    return tuple(map(operator.call, _READS))


def set_switches(wanted: Sequence[Any], now: Sequence[Any]) -> None:
    """Set all switches, unless they are as wanted ``now``."""
    if wanted != now:
        for (_, write), value in zip(_SWITCHES, wanted, strict=True):
            write(value)


def recomputing() -> str | None:
    """The unit whose forward this thread is running again for backward; None in an ordinary forward.

    For module hooks inside a recomputed unit that must act only once per step.
    """
    return getattr(_here, "unit", None)


class running_again:
    """What runs inside belongs to ``unit``, outside of its ordinary forward."""

    __slots__ = ("_outer", "_unit")

    def __init__(self, unit: str) -> None:
        self._unit = unit

    def __enter__(self) -> None:
        self._outer, _here.unit = getattr(_here, "unit", None), self._unit

    def __exit__(self, *raised: Any) -> None:
        _here.unit = self._outer


@contextmanager
def one_at_a_time(unit: str) -> Iterator[None]:
    """Random states and switches belong to the process: what one thread restores for a recomputation is not for
    another's. Raises ConflictError after long, as where a recomputation waits for a backward in another thread."""
    if not _lock.acquire(timeout=_PATIENCE):
        raise ConflictError(
            f"{unit} cannot run: another thread has been recomputing units for {_PATIENCE:.0f} s",
            remedy="Call backward in one thread at a time, or use `save` or `offload` on units that call it.",
        )
    try:
        yield
    finally:
        _lock.release()
