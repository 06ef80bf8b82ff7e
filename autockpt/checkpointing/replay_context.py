"""What a forward runs under, and how to run it again under the same: random states, autocast, default device, default
type, and the kernels that are allowed.

Python's and NumPy's generators are read only for units that were seen to draw from them: reading both takes longer than
a tiny layer's forward.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autockpt.checkpointing.autocast import AutocastState
from autockpt.devices.random_states import TorchStates
from autockpt.errors import ConflictError

_C: Any = torch._C
_function_modes: Callable[[], int] = _C._len_torch_function_stack
_CPU = torch.device("cpu")
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    # in which order they are tried: sdpa_kernel(..., set_priority=True)
    (_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    *(
        (functools.partial(getattr, backend, name), functools.partial(setattr, backend, name))
        for backend, name in (
            (torch.backends.cudnn, "enabled"),
            (torch.backends.cudnn, "deterministic"),
            (torch.backends.mkldnn, "enabled"),
        )
    ),
    (torch.get_default_dtype, torch.set_default_dtype),
)
cuda_is_initialized = torch.cuda.is_initialized
_PATIENCE = 120.0  # seconds
_here = threading.local()
_turn = threading.RLock()


class ReplayContext:
    """Made before a forward. ``tensors`` show on which devices it may draw random numbers; ``generators`` are random
    generators among its arguments; ``python``: it may draw from Python's or NumPy's.

    Raises ConflictError while a CUDA graph is being captured.
    """

    __slots__ = ("_default_device", "_generators", "_places", "_python", "_switches", "_torch", "autocast")

    def __init__(
        self, tensors: Iterable[torch.Tensor], generators: Sequence[torch.Generator] = (), python: bool = False
    ) -> None:
        elsewhere = [t.device for t in tensors if not (t.is_cpu or t.is_meta)]
        self._places = sorted({(device.type, device.index or 0) for device in elsewhere}) if elsewhere else []
        self._torch = torch_states(self._places)
        self._generators = [(generator, generator.get_state()) for generator in generators]
        self._python = _python_states() if python else None
        self.autocast = AutocastState(["cpu", *dict.fromkeys(kind for kind, _ in self._places)])
        self._default_device = _default_device()
        self._switches = switches()

    def now(self) -> TorchStates:
        """PyTorch's random states as they are by now."""
        return torch_states(self._places)

    def forget_python_unless_drawn(self) -> bool:
        """The forward has ended: whether it drew from Python's or NumPy's generator. If not, they are dropped."""
        if self._python is not None and _same_states(self._python, _python_states()):
            self._python = None
        return self._python is not None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As before the forward, and afterwards as now."""
        now, allowed, device = self.now(), switches(), self._default_device
        generators = [(generator, generator.get_state()) for generator, _ in self._generators]
        python = None if self._python is None else _python_states()
        with nullcontext() if device == _default_device() else device, self.autocast.restored():
            try:
                self._put(self._torch, self._generators, self._python)
                if self._switches != allowed:
                    put_switches(self._switches)
                yield
            finally:
                self._put(now, generators, python)
                if self._switches != allowed:
                    put_switches(allowed)

    @staticmethod
    def _put(of_torch: TorchStates, generators: Sequence[tuple[torch.Generator, Any]], python: Any) -> None:
        of_torch.put_back()
        for generator, state in generators:
            generator.set_state(state)
        if python is not None:
            _put_python_states(python)


def torch_states(places: Iterable[tuple[str, int]]) -> TorchStates:
    """As they are now. Raises ConflictError while a CUDA graph is being captured."""
    try:
        return TorchStates(places)
    except RuntimeError as error:
        if "capture" not in str(error):
            raise
        raise ConflictError(
            "a CUDA graph is being captured, and what runs again in backward needs the random state, which cannot be "
            "read then",
            remedy="Use save for units inside of captured graphs.",
        ) from error


def _python_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _same_states(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    if before[0] != now[0] or before[1] is None or now[1] is None:
        return before[0] == now[0] and before[1] is now[1]
    return all(bool((a == b).all()) if hasattr(a, "all") else a == b for a, b in zip(before[1], now[1], strict=True))


def _put_python_states(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


@functools.cache
def settle_order_of_attentions() -> None:
    """At a process's first fused attention on CUDA PyTorch may put cuDNN's first (``priority_order`` in its
    ``cuda/sdp_utils.cpp``; seen on an H100 with torch 2.11). Read before that, the order is not the one in force.

    Asked on a GPU that is in use: another would be given a context of its own, and may order them in another way."""
    current, there = torch.cuda.current_device(), range(torch.cuda.device_count())
    used = next((n for n in (current, *there) if _C._cuda_hasPrimaryContext(n)), current)
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.inference_mode(False):
        given = torch.empty(1, 1, 8, 8, dtype=torch.float16, device=f"cuda:{used}")
        _C._VariableFunctions._fused_sdp_choice(given, given, given)


def switches() -> list[Any]:
    """Which kernels are allowed now, the order of those for attention, and the default type."""
    if cuda_is_initialized():
        settle_order_of_attentions()
    return [read() for read, _ in _SWITCHES]


def put_switches(wanted: Sequence[Any]) -> None:
    """Make them what they were."""
    for (_, put), value in zip(_SWITCHES, wanted, strict=True):
        put(value)


def _default_device() -> torch.device:
    """Where tensors are made by default: a function mode decides, and asking for it takes long."""
    return torch.get_default_device() if _function_modes() else _CPU


def recomputing() -> str | None:
    """The unit whose forward this thread is running again for backward; None in an ordinary forward.

    For module hooks inside a recomputed unit that must act only once per step.
    """
    return getattr(_here, "unit", None)


@contextmanager
def running_again(unit: str) -> Iterator[None]:
    """What runs inside belongs to ``unit``, outside of its ordinary forward."""
    outer = recomputing()
    _here.unit = unit
    try:
        yield
    finally:
        _here.unit = outer


def _released() -> None:
    global _turn
    _turn = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_released)  # whoever held it is not in the child


@contextmanager
def one_at_a_time(unit: str) -> Iterator[None]:
    """Random states and switches belong to the process: what one thread restores for a recomputation is not for
    another's. Raises ConflictError after long, as where a recomputation waits for a backward in another thread."""
    lock = _turn
    if not lock.acquire(timeout=_PATIENCE):
        raise ConflictError(
            f"{unit} cannot run: another thread has been recomputing units for {_PATIENCE:.0f} s",
            remedy="Call backward in one thread at a time, or use `save` or `offload` on units that call it.",
        )
    try:
        yield
    finally:
        lock.release()
