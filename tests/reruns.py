"""Counting what a step really executes a second time, unit by unit, without asking the policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.checkpointing.op_table import is_attention, is_heavy
from autockpt.checkpointing.replay_context import recomputing
from autockpt.policies.compiling import uncompiled
from autockpt.workload.units import module_of


class RunCounter(TorchDispatchMode):
    """Counts matrix products, attentions and convolutions by unit: ``forward``, ``again``, ``attention again``, ….

    An op belongs to the unit whose inside was entered last. During backward gradients are enabled only while something
    is being recomputed.
    """

    def __init__(self, model: nn.Module, units: Iterable[str]) -> None:
        super().__init__()
        self.counts = {name: Counter[str]() for name in units}
        self._unit: str | None = None
        self._roots = {module_of(model, name): name for name in self.counts}
        outer_first = sorted(self._roots.items(), key=lambda root: root[1].count("."))  # inner units win
        self._owner = {module: name for root, name in outer_first for module in root.modules()}

    @contextmanager
    def counting(self) -> Iterator[RunCounter]:
        """Count what the block executes."""
        hooks = [module.register_forward_pre_hook(self._enter) for module in self._owner]
        hooks += [module.register_forward_hook(self._leave) for module in self._roots]
        try:
            with uncompiled(), self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unit = recomputing() or self._unit
        in_backward = torch._C._current_graph_task_id() != -1
        again = in_backward and torch.is_grad_enabled()
        if unit in self.counts and is_heavy(func) and (again or not in_backward):
            when = "again" if again else "forward"
            self.counts[unit].update([when, *([f"attention {when}"] if is_attention(func) else [])])
        return func(*args, **(kwargs or {}))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._unit = self._owner[module]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._unit = None
