"""Counting what a step really executes a second time, unit by unit, without asking the policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import Field
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.checkpointing.arguments import tensors_of
from autockpt.checkpointing.kept_outputs import given_up
from autockpt.checkpointing.op_table import draws_random_numbers, is_attention, is_heavy
from autockpt.checkpointing.replay_context import recomputing
from autockpt.policies.compiling import uncompiled
from autockpt.policies.selective import kept_by, product_modules
from autockpt.schema.base import Data
from autockpt.schema.choices import ATTENTION, EVERYTHING, Choice, Remake
from autockpt.schema.names import strip_prefixes
from autockpt.workload.units import module_of, unwrap


class UnitRuns(Data):
    """What one unit executed in one step: matrix products, attentions and convolutions."""

    forward: int = 0
    again: int = Field(default=0, description="executed once more during backward")
    named: int = Field(default=0, description="of those in forward, such whose outputs the choice keeps")
    named_again: int = Field(default=0, description="of those, executed once more")
    changed: int = Field(default=0, description="of those, such as were changed in place and could not be kept")
    ops_again: int = Field(default=0, description="ops of any kind executed once more during backward")
    trains: bool = Field(default=False, description="its output took part in backward")


class RunCounter(TorchDispatchMode):
    """Counts while active. An op belongs to the innermost named unit whose inside was entered last.

    During backward gradients are enabled only while something is being recomputed; that tells the two apart. Ops whose
    outputs ``choices`` keep are counted apart.
    """

    def __init__(self, model: nn.Module, choices: Mapping[str, Choice]) -> None:
        super().__init__()
        self._counts = {name: Counter[str]() for name in choices}
        self._kept = {name: kept for name, choice in choices.items() if (kept := kept_by(choice))}
        self._rematerialized = {name for name, choice in choices.items() if isinstance(choice, Remake)}
        self._named: dict[nn.Module, str] = {}
        for name, kept in self._kept.items():
            unit = unwrap(module_of(model, name))
            named = [m for path, m in unit.named_modules() if strip_prefixes(path) in kept or EVERYTHING in kept]
            if name not in self._rematerialized:
                named = [inner for module in named for inner in product_modules(module)]
            self._named |= dict.fromkeys(named, name)
        self._open: list[nn.Module] = []
        self._trains: set[str] = set()
        self._unit: str | None = None
        self._roots = {module_of(model, name): name for name in self._counts}
        outer_first = sorted(self._roots.items(), key=lambda root: root[1].count("."))  # inner units win
        self._owner = {module: name for root, name in outer_first for module in root.modules()}

    def result(self) -> dict[str, UnitRuns]:
        """The counts so far, by unit."""
        return {name: UnitRuns(**counts, trains=name in self._trains) for name, counts in self._counts.items()}

    def _is_kept(self, unit: str, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the unit's choice keeps what this op returns. What draws random numbers runs again in any case."""
        kept = self._kept.get(unit, ())
        if not kept or draws_random_numbers(func, args, kwargs):
            return False
        everything, attends = EVERYTHING in kept, is_attention(func)
        if (everything and unit in self._rematerialized) or (attends and (everything or ATTENTION in kept)):
            return True
        return any(self._named[module] == unit for module in self._open)

    @contextmanager
    def counting(self) -> Iterator[RunCounter]:
        """Count what the block executes."""
        hooks = [module.register_forward_pre_hook(self._enter) for module in self._owner]
        hooks += [module.register_forward_hook(self._leave) for module in self._roots]
        hooks += [module.register_forward_pre_hook(self._enter_named) for module in self._named]
        hooks += [module.register_forward_hook(self._leave_named, always_call=True) for module in self._named]
        try:
            with uncompiled(), self, given_up() as changed:
                yield self
                for name, count in changed.items():
                    if name in self._counts:
                        self._counts[name]["changed"] += count
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        unit = recomputing() or self._unit
        if unit in self._counts:
            in_backward = torch._C._current_graph_task_id() != -1
            again = in_backward and torch.is_grad_enabled()
            if again:
                self._counts[unit]["ops_again"] += 1
            if is_heavy(func) and (again or not in_backward):
                self._counts[unit]["again" if again else "forward"] += 1
                if self._is_kept(unit, func, args, kwargs):
                    self._counts[unit]["named_again" if again else "named"] += 1
        return func(*args, **kwargs)

    def _enter_named(self, module: nn.Module, args: Any) -> None:
        self._open.append(module)

    def _leave_named(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self._open:
            del self._open[self._open.index(module) :]

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._unit = self._owner[module]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if any(tensor.requires_grad for tensor in tensors_of(output)):
            self._trains.add(self._roots[module])
        self._unit = None
