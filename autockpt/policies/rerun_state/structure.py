"""Which modules a unit consists of, what they run, and how many parameters each has: what was learned holds for these
only."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autockpt.policies.attachment import AttachedForward
from autockpt.policies.base import places_of


class UnitStructure:
    """A unit's modules as they are now. They can be exchanged or added at any time (adapters, layers that grow)."""

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self.places = places_of(module, "_parameters")
        self._children = [(inner._modules, name) for inner in modules for name in inner._modules]
        self._modules, self._fields = modules, [vars(inner) for inner in modules]
        self._inner, self._forwards = list(self._now()), [f.get("forward") for f in self._fields]
        self._counted: list[Mapping[str, Any]] = [inner._modules for inner in modules]
        self._counted += [inner._parameters for inner in modules if not is_sharded(inner)]
        self._sizes = self._count()

    def still_is(self) -> bool:
        """Whether no module or forward was exchanged, and no module or parameter added or taken away, since."""
        same = all(map(operator.is_, self._now(), self._inner))
        return same and self._count() == self._sizes and self._same_forwards()

    def _now(self) -> Iterator[Any]:
        inner = [children.get(name) for children, name in self._children]
        return itertools.chain(inner, map(type, self._modules))

    def parameters(self) -> list[torch.Tensor | None]:
        """Those at their ``places`` as they are now: FSDP exchanges them, so the modules are asked each time."""
        return [home.get(name) for home, name in self.places]

    @functools.cached_property
    def _views(self) -> list[tuple[dict[str, Any], str]]:
        return [(fields, name) for fields in self._fields for name in fields if isinstance(fields[name], torch.Tensor)]

    def without_memory(self) -> bool:
        """Whether the views that FullyShardedDataParallel puts in the place of parameters have lost their memory."""
        now = (fields.get(name) for fields, name in self._views)
        plain = (t for t in now if type(t) is torch.Tensor and t.numel() > 0 and t.layout is torch.strided)
        return any(t.untyped_storage().nbytes() == 0 for t in plain)

    def _same_forwards(self) -> bool:
        """Whether every module still has the same forward on itself, choices attached to it aside."""
        now = [fields.get("forward") for fields in self._fields]
        return all(map(operator.is_, now, self._forwards)) or all(
            map(operator.is_, map(placed_before, now), map(placed_before, self._forwards))
        )

    def _count(self) -> list[int]:
        return list(map(len, self._counted))


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP puts views of its own in the place of the module's parameters, and takes them away again."""
    return "_is_fsdp_managed_module" in vars(module)


def placed_before(forward: Any) -> Any:
    """The forward that a module had on itself before any choice was attached."""
    while type(forward) is AttachedForward:
        forward = forward.state.inner
    return forward
