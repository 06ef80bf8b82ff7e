"""Counting what a step really executes a second time, unit by unit, without asking the policies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import Field
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autockpt.devices import Parcel, Transport, Transports, transport_for
from autockpt.policies import is_heavy, recomputing
from autockpt.schema.base import Data
from autockpt.workload.units import module_of


class UnitRuns(Data):
    """What one unit executed in one step: matrix products, attentions and convolutions, and bytes moved."""

    forward: int = 0
    again: int = Field(default=0, description="executed once more during backward")
    moved_bytes: int = Field(default=0, description="sent off the device")
    trains: bool = Field(default=False, description="its output took part in backward")


class RunCounter(TorchDispatchMode):
    """Counts while active. An op belongs to the innermost named unit whose inside was entered last.

    During backward gradients are enabled only while something is being recomputed; that tells the two apart.
    """

    def __init__(self, model: nn.Module, units: Iterable[str]) -> None:
        super().__init__()
        self._counts: dict[str, dict[str, int]] = {name: {"forward": 0, "again": 0, "moved_bytes": 0} for name in units}
        self._trains: set[str] = set()
        self._unit: str | None = None
        self._owner: dict[nn.Module, str] = {}
        self._roots: dict[nn.Module, str] = {}
        for name in sorted(self._counts, key=lambda n: n.count(".")):  # inner units come last and win
            root = module_of(model, name)
            self._roots[root] = name
            self._owner |= dict.fromkeys(root.modules(), name)

    def result(self) -> dict[str, UnitRuns]:
        """The counts so far, by unit."""
        return {name: UnitRuns(**counts, trains=name in self._trains) for name, counts in self._counts.items()}

    def transports(self, ways: Transports = transport_for) -> Transports:
        """Ways like ``ways`` whose sent bytes are counted for the unit that sends them."""
        return lambda device, tier: _CountingTransport(ways(device, tier), self)

    def moved(self, nbytes: int) -> None:
        """Bytes leave the device, sent by the present unit."""
        if self._unit is not None:
            self._counts[self._unit]["moved_bytes"] += nbytes

    @contextmanager
    def counting(self) -> Iterator[RunCounter]:
        """Count what the block executes."""
        hooks = [module.register_forward_pre_hook(self._enter) for module in self._owner]
        hooks += [module.register_forward_hook(self._leave) for module in self._roots]
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_heavy(func):
            unit = recomputing() or self._unit
            in_backward = torch._C._current_graph_task_id() != -1
            if unit in self._counts and (not in_backward or torch.is_grad_enabled()):
                self._counts[unit]["again" if in_backward else "forward"] += 1
        return func(*args, **(kwargs or {}))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._unit = self._owner[module]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        leaves = tree_leaves(output)
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            self._trains.add(self._roots[module])
        self._unit = None


class _CountingTransport:
    def __init__(self, inner: Transport, counter: RunCounter) -> None:
        self._inner, self._counter = inner, counter
        self.copy_queues = inner.copy_queues

    def send(self, source: torch.Tensor) -> Parcel:
        self._counter.moved(source.numel())
        return self._inner.send(source)
