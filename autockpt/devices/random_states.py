"""Random states of all devices in use: the one place that reads, restores and seeds them."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autockpt.devices.accelerator import kinds_in_use


def seed(device: torch.device, number: int) -> None:
    """Seed PyTorch's generator of the CPU and, if that is an accelerator, of the device, which must be current."""
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        # of a registered backend PyTorch asks for the second only
        (getattr(module, "manual_seed", None) or module.manual_seed_all)(number)


class TorchStates:
    """The states of PyTorch's generators as they are now: the CPU's, and those of ``accelerators``, each a kind and an
    index (None: all in use). They lie on the host; errors are the backends' own."""

    def __init__(self, accelerators: Iterable[tuple[str, int]] | None = None) -> None:
        self._cpu = torch.get_rng_state()
        wanted = _accelerators_in_use() if accelerators is None else accelerators
        self._states = [(kind, index, torch.get_device_module(kind).get_rng_state(index)) for kind, index in wanted]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The states, on the host, the CPU's first."""
        return [self._cpu, *(state for _, _, state in self._states)]

    def restore(self) -> None:
        """Make them the states that are drawn from."""
        torch.set_rng_state(self._cpu)
        for kind, index, state in self._states:
            torch.get_device_module(kind).set_rng_state(state, index)


class PythonStates:
    """The states of Python's generator and, where it is loaded, of NumPy's as they are now."""

    def __init__(self) -> None:
        numpy = sys.modules.get("numpy")
        self._python, self._numpy = random.getstate(), None if numpy is None else numpy.random.get_state()

    def were_drawn_from(self) -> bool:
        """Whether one of them is another by now. NumPy that was loaded since counts as such."""
        now = PythonStates()
        # NumPy's is a tuple with an array in it
        return self._python != now._python or pickle.dumps(self._numpy) != pickle.dumps(now._numpy)

    def restore(self) -> None:
        """Make them the states that are drawn from."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class RandomStates:
    """The states of Python's, NumPy's and PyTorch's generators, on every device in use."""

    def __init__(self) -> None:
        self._python, self._torch = PythonStates(), TorchStates()

    def restore(self) -> None:
        """Make them the states that are drawn from."""
        self._python.restore()
        self._torch.restore()


@contextmanager
def all_random_states_kept() -> Iterator[None]:
    """All random states are afterwards as before."""
    before = RandomStates()
    try:
        yield
    finally:
        before.restore()


def _accelerators_in_use() -> list[tuple[str, int]]:
    modules = {kind: torch.get_device_module(kind) for kind in kinds_in_use()}
    return [
        (kind, index)
        for kind, module in modules.items()
        if hasattr(module, "get_rng_state")
        for index in range(module.device_count())
    ]
