"""Equal conditions for every measured cycle: the same random state, the same weights, no garbage collection inside."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autockpt.devices import random_states
from autockpt.interpreter import frozen, waiting


def seed_all(seed: int, device: torch.device) -> None:
    """Seed every generator a step may draw from: Python's, NumPy's where loaded, PyTorch's on CPU and device."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    random_states.seed(device, seed)


@contextmanager
def weights_held(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Learning rates of zero: the optimizer does all its work, and weights stay as they are.

    So every cycle sees the same numbers, however many ran before it (experts are routed alike, nothing turns into
    denormals or NaN). Learning rates kept in tensors are left alone.
    """
    groups = [] if optimizer is None else [g for g in optimizer.param_groups if isinstance(g.get("lr"), (int, float))]
    before = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        for group, rate in zip(groups, before, strict=True):
            group["lr"] = rate


class Freezer:
    """Puts aside objects that live on, so that collections look only at what came after them.

    With transformers and an optimizer loaded a full collection takes 0.2 s, and one precedes every timed cycle. Does
    nothing where somebody froze objects before: those and ours could not be distinguished when thawing.
    """

    def __init__(self) -> None:
        self._ours = not frozen()

    def freeze(self) -> None:
        """Put aside all that is alive. To be called after a collection, or garbage would be put aside as well."""
        if self._ours:
            gc.freeze()

    def thaw(self) -> None:
        """Let collections see everything again."""
        if self._ours:
            gc.unfreeze()


@contextmanager
def garbage_held() -> Iterator[None]:
    """Collect now and not again until the end: a collection inside a timed cycle would be measured with it."""
    gc.collect()
    with waiting():
        yield


class OptimizerStates:
    """Which states an optimizer had before a cycle; those that a failed cycle left half made can be taken out again."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        state = {} if optimizer is None else optimizer.state
        self._keys = {id(key): set(value) for key, value in state.items() if isinstance(value, dict)}

    def take_back(self) -> None:
        """Remove every state that was not there when this was made."""
        if self._optimizer is None:
            return
        for key, value in list(self._optimizer.state.items()):
            if id(key) not in self._keys:
                del self._optimizer.state[key]
            elif isinstance(value, dict):
                for name in set(value) - self._keys[id(key)]:
                    del value[name]
