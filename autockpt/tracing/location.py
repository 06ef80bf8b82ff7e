"""The phase and the module that each recorded op belongs to, found by module hooks and autograd's sequence numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autockpt.checkpointing.replay_context import recomputing, sequence_nr
from autockpt.schema.graph import PHASES, Phase
from autockpt.schema.names import strip_prefixes

Mark = Callable[[Phase], None]
FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER = range(4)
assert PHASES == ("forward", "recompute", "backward", "optimizer")
_grad_enabled = torch.is_grad_enabled


@contextmanager
def optimizer_steps(mark: Mark) -> Iterator[None]:
    """Announce every optimizer's step, for training loops that do not announce their phases themselves."""
    before = register_optimizer_step_pre_hook(lambda *_: mark("optimizer"))
    after = register_optimizer_step_post_hook(lambda *_: mark("forward"))
    with before, after:
        yield


class Location:
    """Follows module calls and autograd nodes; a context manager that hooks every module call of this process.

    In forward the innermost running module owns an op. An autograd node belongs to the module in whose forward it was
    made, known by its sequence number, and an op of backward to the node that is being evaluated. Gradients enabled or
    a module running while a node is evaluated means recompute. ``paths`` are qualified names without wrapper prefixes;
    module 0 is the root. ``order`` lists modules in the order of their first call.
    """

    def __init__(self) -> None:
        self.bind(nn.Identity())

    def bind(self, model: nn.Module) -> None:
        """Learn the module tree that paths refer to."""
        self.paths: list[str] = [""]
        self._numbers: dict[int, int] = {}
        self._owners: dict[int, int] = {}  # parameter id -> module
        self._units: dict[str, int] = {}  # path -> the innermost module of that path
        for path, module in model.named_modules():
            self._register(module, strip_prefixes(path))
        self.order: dict[int, None] = {}
        self.reset()

    def reset(self) -> None:
        """Start of a cycle: no module runs or has run, and no autograd node is known."""
        self.order.clear()
        self.phase = FORWARD
        self.accumulating = False
        self._stack: list[int] = [0]
        self._depth = 1
        self._modules_of_nodes: dict[int, int] = {}
        self._claimed = sequence_nr()
        self._last_backward = 0

    def mark(self, phase: Phase) -> None:
        """Called by the workload as each phase begins."""
        self.phase = OPTIMIZER if phase == "optimizer" else FORWARD
        if phase == "forward":
            del self._stack[1:]

    def where(self, node: Any) -> tuple[int, int]:
        """(phase, module) of the op that is about to run while autograd evaluates ``node`` (None: outside backward)."""
        if node is None:
            self._depth = len(self._stack)
            self.accumulating = False
            module = self._stack[-1]
            self._claim(module)
            return self.phase, module
        if _grad_enabled() or len(self._stack) > self._depth:
            if len(self._stack) > self._depth:
                module = self._stack[-1]
            elif (module := self._units.get(recomputing() or "")) is None:  # of the recomputed unit
                module = self._module_of(node)
            self.accumulating = False
            self._claim(module)
            return RECOMPUTE, module
        return BACKWARD, self._module_of(node)

    @property
    def module(self) -> int:
        """The module that runs now."""
        return self._stack[-1] if len(self._stack) > 1 else self._last_backward

    def __enter__(self) -> Location:
        self._handles = (
            nn_module.register_module_forward_pre_hook(self._before),
            nn_module.register_module_forward_hook(self._after, always_call=True),
        )
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _register(self, module: nn.Module, path: str) -> None:
        # A wrapper and its inside share a path; each still has a number of its own.
        self._numbers[id(module)] = number = len(self.paths) if path else 0
        if path:
            self.paths.append(path)
            self._units[path] = number
        for parameter in module._parameters.values():
            if parameter is not None:
                self._owners.setdefault(id(parameter), number)

    def _before(self, module: nn.Module, _: Any) -> None:
        number = self._numbers.get(id(module), self._stack[-1])
        self._claim(self._stack[-1])
        self._stack.append(number)
        self.order.setdefault(number)

    def _after(self, module: nn.Module, _: Any, __: Any) -> None:
        self._claim(self._stack[-1])
        if len(self._stack) > 1:
            self._stack.pop()

    def _claim(self, module: int) -> None:
        """The nodes made since the last claim belong to ``module``."""
        now = sequence_nr()
        if now > self._claimed:
            for number in range(self._claimed, now):
                self._modules_of_nodes[number] = module
        self._claimed = now

    def _module_of(self, node: Any) -> int:
        module = self._modules_of_nodes.get(node._sequence_nr())
        self.accumulating = False
        if module is None and node.name() == "torch::autograd::AccumulateGrad":
            self.accumulating = True
            module = self._owners.get(id(node.variable))
        if module is None:
            module = self._last_backward
        self._last_backward = module
        return module
