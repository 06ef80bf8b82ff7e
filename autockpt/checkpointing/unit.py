"""What all calls of one checkpointed unit have in common: its modules and parameters, what its forwards change, and
which calls are checked."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from autockpt.checkpointing.divergence import FIRST_CALLS, LONGEST, Schedule, UnitCheck
from autockpt.checkpointing.module_state import Entry, ModuleState
from autockpt.checkpointing.replay_context import Accelerator, accelerators_of

_type_of = operator.attrgetter("dtype", "requires_grad", "device")
_training = operator.itemgetter("training")
_chained = itertools.chain.from_iterable


class CallKind:
    """Calls that are alike in types, gradients, devices and modes. Sizes do not count: batches without padding have a
    new length in each step.

    They run on these ``accelerators``. ``indices``: numbers of the small tensors of indices that they save.
    ``is_steady``: two recordings of one signature were the same; ``misses``: so often calls turned out to do something
    else (``recorded_call``).
    """

    def __init__(self, schedule: Schedule, accelerators: list[Accelerator]) -> None:
        self.schedule, self.accelerators = schedule, accelerators
        self.indices = set[int]()
        self.is_steady, self.misses = False, 0


class CheckpointedUnit:
    """A module whose calls are checkpointed, as its modules are now. ``check`` compares what they recompute."""

    gap: ClassVar[int] = 1  # calls that go unchecked, for the first time

    def __init__(self, name: str, module: nn.Module, check: UnitCheck) -> None:
        self.name, self.module, self.check = name, module, check
        self.state = ModuleState(name, module)
        self.draws_in_python = False
        self.learned: dict[Any, Any] = {}  # by what a call is given, for frames that learn more from calls
        modules = self.state.modules
        self._kinds: dict[Any, CallKind] = {}
        named = ((m._parameters, name, p) for m in modules for name, p in m._parameters.items())
        self._homes: list[tuple[dict[str, Any], str]] = [(home, name) for home, name, p in named if p is not None]
        self._modules = [m._modules for m in modules if m is module or m._modules]
        self._children: list[nn.Module | None] = [*_chained(map(dict.values, self._modules))]
        # FullyShardedDataParallel takes parameters away and puts views of its own in their place
        self._whole = [m._parameters for m in modules if "_is_fsdp_managed_module" not in vars(m)]
        self._sharded = [vars(m) for m in modules if "_is_fsdp_managed_module" in vars(m)]
        self._filled = [home for home in self._whole if home]
        self._names, self._present = [*_chained(self._whole)], self._presence()

    def kind_of(self, tensors: Sequence[torch.Tensor], training: Sequence[bool]) -> CallKind:
        """The kind of a call with these inputs and ``training`` flags of the modules."""
        key = (*training, *map(_type_of, tensors))
        if (kind := self._kinds.get(key)) is None:
            accelerators = accelerators_of([*tensors, *self.parameters()])
            # after many calls so many go unchecked that none of the few measured ones is
            schedule = Schedule(1, LONGEST) if self.check.sentinels.in_mid_training else Schedule(FIRST_CALLS, self.gap)
            kind = self._kinds[key] = CallKind(schedule, accelerators)
        return kind

    def has_same_modules(self) -> bool:
        """Whether no module was exchanged, and no module or parameter added or taken away, since this was made."""
        children = [*_chained(map(dict.values, self._modules))]
        same_names = children == self._children and [*_chained(self._whole)] == self._names
        return same_names and self._presence() == self._present

    def _presence(self) -> list[bool]:
        """By parameter whether there is one: a bias may be None."""
        return [*map(operator.is_not, _chained(map(dict.values, self._filled)), itertools.repeat(None))]

    def training(self) -> list[bool]:
        """The modules' ``training`` flags."""
        return list(map(_training, self.state.fields))

    def parameters(self) -> list[torch.Tensor | None]:
        """As they are now: FSDP, ``functional_call`` and PEFT exchange them, and FSDP takes some away."""
        return [home.get(name) for home, name in self._homes]

    def exchanged(self, before: Sequence[torch.Tensor | None]) -> list[Entry]:
        """The parameters that are other objects now than those of ``before``, as they were then."""
        if all(map(operator.is_, before, self.parameters())):
            return []
        pairs = zip(self._homes, before, strict=True)
        return [Entry(home, name, then, None, [0]) for (home, name), then in pairs if home.get(name) is not then]

    def lost_memory(self) -> bool:
        """Whether the views that FullyShardedDataParallel puts in the place of parameters have lost their memory."""
        views = (value for fields in self._sharded for value in fields.values() if type(value) is torch.Tensor)
        plain = (view for view in views if view.numel() and view.layout is torch.strided)
        return any(not view.untyped_storage().nbytes() for view in plain)


def is_in_pieces(entry: Entry) -> bool:
    """Whether FSDP2 (another type), or FullyShardedDataParallel with original parameters, has taken a parameter
    apart."""
    now = entry.home.get(entry.name)
    return (hasattr(now, "to_local") and not hasattr(entry.value, "to_local")) or hasattr(now, "_fsdp_flattened")


def holds_other_values(entry: Entry) -> bool:
    """Whether there are other values in the place of an exchanged parameter. FSDP and accelerate exchange objects for
    the same values.

    So does PEFT's DoRA on the CPU: each forward puts another object over the same packed, frozen weight.
    """
    then, now = entry.value, entry.home.get(entry.name)
    if then is None or now is None or then.is_meta or now.is_meta:
        return False
    packed = type(now).__name__ in ("Params4bit", "Int8Params") and not now.requires_grad
    if packed and type(then) is type(now) and then.data_ptr() == now.data_ptr() and then.shape == now.shape:
        return False
    return not (hasattr(then, "to_local") or hasattr(now, "to_local"))
