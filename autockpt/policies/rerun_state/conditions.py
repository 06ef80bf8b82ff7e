"""The random states, autocast, default device and user's modes under which a forward ran, for running it again under
the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from autockpt.devices.random_states import TorchStates
from autockpt.errors import ConflictError
from autockpt.policies.rerun_state.reach import is_library

Place = tuple[str, int]
_CPU = torch.device("cpu")
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack  # type: ignore[attr-defined]
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # type: ignore[attr-defined]


class Conditions:
    """Taken before a forward. ``tensors`` show which devices it may draw random numbers on.

    Raises ConflictError while a CUDA graph is being captured.
    """

    def __init__(self, tensors: Iterable[torch.Tensor | None]) -> None:
        elsewhere = [t.device for t in tensors if t is not None and not (t.is_cpu or t.is_meta)]
        places = sorted({(device.type, device.index or 0) for device in elsewhere}) if elsewhere else ()
        self._places, self._random = places, _random_states(places)
        kinds = dict.fromkeys(kind for kind, _ in places if torch.amp.is_autocast_available(kind))
        self._casts = Casts("cpu", *kinds)
        self._default_device = _default_device()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As then, and afterwards as now."""
        now = _random_states(self._places)
        self._random.put_back()
        with ExitStack() as stack:
            stack.callback(now.put_back)
            if self._default_device != _default_device():
                stack.enter_context(self._default_device)
            with self._casts.restored():
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
        """As then."""
        cache, states = self._then
        with ExitStack() as stack:
            for kind, enabled, dtype in states if self._then != self._now() else ():
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache))
            with under(self._modes):
                yield


def user_function_modes() -> list[Any]:
    """Modes in force that may change what functions compute, the outermost first: all but those of libraries, which
    look on."""
    return _of_users(_get_current_function_mode_stack()) if _function_modes() else []


def user_dispatch_modes() -> list[Any]:
    """The same of ops."""
    return _of_users(_get_current_dispatch_mode_stack()) if _dispatch_modes() else []


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


def _random_states(places: Iterable[Place]) -> TorchStates:
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


def _default_device() -> torch.device:
    """Where tensors are made that say nothing of it: a mode tells, and to ask for one takes long."""
    return torch.get_default_device() if _function_modes() else _CPU
