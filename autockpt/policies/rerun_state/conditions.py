"""The random states, autocast and default device under which a forward ran, for running it again under the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from autockpt.devices import random_states
from autockpt.errors import ConflictError

Place = tuple[str, int]
_Autocast = tuple[bool, list[tuple[str, bool, torch.dtype]]]
"""Whether casts of weights are cached; per kind of device whether autocast is on, and its type."""
_CPU = torch.device("cpu")
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack  # type: ignore[attr-defined]


class Conditions:
    """Taken before a forward. ``tensors`` show which devices it may draw random numbers on.

    Raises ConflictError while a CUDA graph is being captured.
    """

    __slots__ = ("_autocast", "_cpu", "_default_device", "_devices")

    def __init__(self, tensors: Iterable[torch.Tensor | None]) -> None:
        elsewhere = [t.device for t in tensors if t is not None and not (t.is_cpu or t.is_meta)]
        places = sorted({(device.type, device.index or 0) for device in elsewhere}) if elsewhere else ()
        self._cpu = torch.get_rng_state()
        self._devices = [(place, _random_state(place)) for place in places]
        self._autocast = _autocast_now(places)
        self._default_device = _default_device()

    @property
    def places(self) -> list[Place]:
        """The accelerators whose random states are known."""
        return [place for place, _ in self._devices]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As then. Random states are not put back at the end: ``random_states_kept`` does that once for many."""
        torch.set_rng_state(self._cpu)
        for place, state in self._devices:
            random_states.set_random_state(*place, state)
        with ExitStack() as stack:
            if self._default_device != _default_device():
                stack.enter_context(self._default_device)
            if self._autocast != _autocast_now(self.places):
                cache, kinds = self._autocast
                for kind, enabled, dtype in kinds:
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache))
            yield


@contextmanager
def random_states_kept(places: Sequence[Place]) -> Iterator[None]:
    """The CPU's random state and those of accelerators are afterwards as before."""
    cpu, devices = torch.get_rng_state(), [(place, _random_state(place)) for place in places]
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        for place, state in devices:
            random_states.set_random_state(*place, state)


def _random_state(place: Place) -> torch.Tensor:
    try:
        return random_states.random_state(*place)
    except RuntimeError as error:
        if "capture" not in str(error):
            raise
        raise ConflictError(
            "a CUDA graph is being captured, and what runs again in backward needs the random state, which cannot be "
            "read then",
            remedy="Use save for units inside of captured graphs.",
        ) from error


def _autocast_now(places: Iterable[Place]) -> _Autocast:
    kinds = ["cpu", *dict.fromkeys(kind for kind, _ in places if torch.amp.is_autocast_available(kind))]
    states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return torch.is_autocast_cache_enabled(), states


def _default_device() -> torch.device:
    """Where tensors are made that say nothing of it: a mode tells, and to ask for one takes long."""
    return torch.get_default_device() if _function_modes() else _CPU
