"""What a forward runs under, for running it again under the same: random states, autocast, default device, the user's
modes, context variables, torch's default type and threads, and which kernels are allowed."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import itertools
import pickle
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)

from autockpt.checkpointing.autocast import autocast_depth, put_autocast
from autockpt.checkpointing.replay_context import cuda_is_initialized, settle_order_of_attentions, torch_states
from autockpt.policies.casts import dispatch_modes
from autockpt.policies.rerun_state.libraries import is_library

_C: Any = torch._C
_CPU = torch.device("cpu")
_function_modes: Callable[[], int] = _C._len_torch_function_stack
_warns = _C._get_deterministic_algorithms_warn_only
_sum_in_fp16 = _C._set_cublas_allow_fp16_reduced_precision_reduction
_sum_in_bf16 = _C._set_cublas_allow_bf16_reduced_precision_reduction
_SWITCHES = (
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    # in which order they are tried: sdpa_kernel(..., set_priority=True)
    (_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda of: torch.set_anomaly_enabled(*of),
    ),
    (_C._get_deterministic_algorithms, lambda on: _C._set_deterministic_algorithms(on, warn_only=_warns())),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    *(
        (partial(_C._get_fp32_precision_getter, *place), partial(_C._set_fp32_precision_setter, *place))
        for place in itertools.product(("cuda", "mkldnn"), ("matmul", "conv", "rnn"))
    ),
    (_C._get_cublas_allow_fp16_accumulation, _C._set_cublas_allow_fp16_accumulation),
    # of pairs: sums in the inputs' precision, and whether a product may be cut along what is summed
    (_C._get_cublas_allow_fp16_reduced_precision_reduction, lambda of: _sum_in_fp16(*of)),
    (_C._get_cublas_allow_bf16_reduced_precision_reduction, lambda of: _sum_in_bf16(*of)),
)


class Surroundings:
    """Taken before a forward. ``tensors`` show which devices it may draw random numbers on.

    Raises ConflictError while a CUDA graph is being captured.
    """

    def __init__(self, tensors: Iterable[torch.Tensor | None]) -> None:
        elsewhere = [t.device for t in tensors if t is not None and not (t.is_cpu or t.is_meta)]
        places = sorted({(device.type, device.index or 0) for device in elsewhere}) if elsewhere else ()
        self._places, self._random = places, torch_states(places)
        kinds = dict.fromkeys(kind for kind, _ in places if torch.amp.is_autocast_available(kind))
        self._casts = Casts("cpu", *kinds)
        self._default_device = _default_device()
        self._draws = [read() for read, _ in _GENERATORS]
        self._switches = switches()
        self._context = contextvars.copy_context()

    def after(self) -> None:
        """The forward has ended: of Python's and NumPy's states what it did not draw from is dropped."""
        self._draws = [
            None if state == read() else state for (read, _), state in zip(_GENERATORS, self._draws, strict=True)
        ]

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a copy of the context that the forward began in: what it sets is gone after it."""
        return self._context.copy().run(function, *args)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As before the forward, and afterwards as now."""
        now = torch_states(self._places)
        with ExitStack() as stack:
            stack.callback(now.put_back)
            self._random.put_back()
            if self._default_device != _default_device():
                stack.enter_context(self._default_device)
            stack.enter_context(self._casts.restored())
            stack.enter_context(switched(self._switches))
            for (read, put), state in zip(_GENERATORS, self._draws, strict=True):
                if state is not None:
                    stack.callback(put, read())
                    put(state)
            yield


class Casts:
    """Autocast of some kinds of devices, and the user's modes, when this was made."""

    def __init__(self, *kinds: str) -> None:
        self._kinds, self._modes = kinds, user_modes()
        self._then = self._now()

    @property
    def enabled(self) -> bool:
        """Whether autocast was on."""
        return any(enabled for _, enabled, _ in self._then[1])

    def _now(self) -> tuple[bool, list[tuple[str, bool, torch.dtype]]]:
        states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._kinds]
        return torch.is_autocast_cache_enabled(), states

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As then, and afterwards as now: of blocks entered by hand a run that ends early does not find the end."""
        (cache, states), now, depth = self._then, self._now(), autocast_depth()
        try:
            with ExitStack() as stack:
                for kind, enabled, dtype in states if self._then != now else ():
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache))
                with under(self._modes):
                    yield
        finally:
            if (now, depth) != (self._now(), autocast_depth()):
                put_autocast(*now, depth)


def user_function_modes() -> list[Any]:
    """Modes in force that may change what functions compute, the outermost first: all but those of libraries, which
    look on."""
    return _of_users(_get_current_function_mode_stack()) if _function_modes() else []


def user_dispatch_modes() -> list[Any]:
    """The same of ops."""
    return _of_users(_get_current_dispatch_mode_stack()) if dispatch_modes() else []


def user_modes() -> list[Any]:
    """Both."""
    return [*user_function_modes(), *user_dispatch_modes()]


def _of_users(modes: Sequence[Any]) -> list[Any]:
    return [mode for mode in modes if not is_library(type(mode))]


@contextmanager
def under(modes: Sequence[Any]) -> Iterator[None]:
    """In these modes, as far as they are not in force anyway."""
    now = user_modes() if modes else ()
    with ExitStack() as stack:
        for mode in (mode for mode in modes if mode not in now):
            # past what its class makes of being entered
            owner: Any = TorchFunctionMode if isinstance(mode, TorchFunctionMode) else TorchDispatchMode
            stack.push(partial(owner.__exit__, mode))
            owner.__enter__(mode)
        yield


def outside_inference() -> AbstractContextManager[Any]:
    """For what runs again in a backward that is itself under ``torch.inference_mode``, as forward was not: what is made
    there autograd does not save."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _default_device() -> torch.device:
    """Where tensors are made that say nothing of it: a mode tells, and to ask for one takes long."""
    return torch.get_default_device() if _function_modes() else _CPU


def python_state() -> tuple[Any, ...]:
    """The state that Python draws from, read twice per call of a unit: 625 machine words and the second of a pair of
    normal numbers where that is left. ``random.getstate`` makes 625 numbers of them, which takes 13 µs, and NumPy's
    48; these take 0.3, where the forward of a tiny layer takes 250."""
    words = _python_words()
    return random.getstate() if words is None else (words.tobytes(), random._inst.gauss_next)  # type: ignore[attr-defined]


def put_python(state: tuple[Any, ...]) -> None:
    """Make it the state that Python draws from."""
    if len(state) == 2:
        index, *numbers = memoryview(state[0]).cast("I")
        state = (3, (*numbers, index), state[1])
    random.setstate(state)


@functools.cache
def _python_words() -> memoryview | None:
    """Where CPython keeps the words, the index before the rest; None where they are not found there."""
    words = _words_at(id(random._inst) + object.__basicsize__)  # type: ignore[attr-defined]
    *numbers, index = random.getstate()[1]
    return words if words.cast("I").tolist() == [index, *numbers] else None


def numpy_state() -> tuple[bytes, ...] | None:
    """The state that NumPy draws from, read in the same way: words, and the left-over normal number. None where NumPy
    is not there."""
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    generator = numpy.random.mtrand._rand
    if (places := _numpy_places(generator._bit_generator)) is None:
        return (pickle.dumps(generator.get_state(legacy=False)),)
    return places[0].tobytes(), places[1].tobytes()


def put_numpy(state: tuple[bytes, ...]) -> None:
    """Make it the state that NumPy draws from."""
    numpy = sys.modules["numpy"]
    if len(state) == 1:
        numpy.random.set_state(pickle.loads(state[0]))
        return
    words, (there, number) = numpy.frombuffer(state[0], "u4"), struct.unpack("i4xd", state[1])
    numpy.random.set_state(("MT19937", words[:624], int(words[624]), there, number))


_GENERATORS: Any = ((python_state, put_python), (numpy_state, put_numpy))


@functools.lru_cache(maxsize=4)
def _numpy_places(source: Any) -> tuple[memoryview, memoryview] | None:
    """Where NumPy keeps its words, and the left-over normal number behind a word that says whether there is one; None
    where they are not found."""
    numpy = sys.modules["numpy"]
    if type(source) is not numpy.random.MT19937:
        return None
    generator, other = numpy.random.mtrand._rand, numpy.random.RandomState(0)
    other.set_state((*other.get_state()[:3], 1, 0.1234567))
    place = ctypes.string_at(id(other), type(other).__basicsize__).find(struct.pack("i4xd", 1, 0.1234567))
    words, state = _words_at(source.ctypes.state_address), generator.get_state()
    if place < 0 or words.cast("I").tolist() != [*state[1], state[2]]:
        return None
    return words, memoryview((ctypes.c_char * 16).from_address(id(generator) + place)).cast("B")


def _words_at(address: int) -> memoryview:
    return memoryview((ctypes.c_uint32 * 625).from_address(address)).cast("B")


def switches() -> list[Any]:
    """Which kernels are allowed, and what else decides on an op's result beside what it is given."""
    if cuda_is_initialized():
        settle_order_of_attentions()
    return [read() for read, _ in _SWITCHES]


@contextmanager
def switched(wanted: list[Any]) -> Iterator[None]:
    """As ``switches`` said, and afterwards as now."""
    now = switches()
    _switch(now, wanted)
    try:
        yield
    finally:
        _switch(switches(), now)


def _switch(now: list[Any], wanted: list[Any]) -> None:
    if now != wanted:
        for (_, put), value, before in zip(_SWITCHES, wanted, now, strict=True):
            if value != before:
                put(value)
