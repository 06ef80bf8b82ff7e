"""Buffers and attributes of a unit's own modules: a recomputation finds them as the forward did, and leaves no trace.

Which of them a forward changes is learned in checked calls, where all of them are compared before and after. In every
other call only what is known to change is taken (running statistics, counters, caches). State elsewhere (globals,
closures, class attributes, modules around the unit) is not restored.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from autockpt.checkpointing.arguments import flatten, tensors_of, unflatten
from autockpt.checkpointing.fingerprint import quietly
from autockpt.errors import ConflictError

COPIED_BYTES = 1 << 24
"""Buffers up to this size are copied in checked calls, and before each forward where forwards change them."""
_NUMBERS = (bool, int, float, str)
_CONTAINERS = (list, dict, set, deque, Counter, OrderedDict, defaultdict)
_PLAIN_TENSORS = (torch.Tensor, nn.Buffer)
_ABSENT: Any = object()
# `forward`: choices are attached and taken off there
_NOT_STATE = frozenset(vars(nn.Module())) | {"forward"}

_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
"""Where a module has hooks that may hand it other arguments. PEFT takes such off when its model has run. Hooks behind a
forward mostly look at what it returns, and are not called again once they are off."""

Key = tuple[int, str]


class Entry(NamedTuple):
    """One buffer or attribute at some time: where it is, and what was in it.

    ``content`` is a copy of what can change while the object stays the same; None for objects without such a copy.
    ``versions`` are the tensor's, or those of what is in a container.
    """

    home: dict[str, Any]
    name: str
    value: Any
    content: Any
    versions: list[int]

    @classmethod
    def of(cls, home: dict[str, Any], name: str) -> Entry:
        value = home.get(name, _ABSENT)
        content = _content(value)
        held = content if type(value) in _CONTAINERS else value  # copies of sets have another order
        return cls(home, name, value, content, [*map(_version, _members(held))])

    def counts_to(self, now: Entry) -> bool:
        """Whether what is there now looks like this, counted on: another number, or another tensor of this shape."""
        if isinstance(self.content, torch.Tensor) and isinstance(now.content, torch.Tensor):
            return self.content.shape == now.content.shape
        return type(self.value) in _NUMBERS and type(now.value) is type(self.value)

    def mutated(self, now: Entry) -> bool:
        """Whether the object that is still there holds something else."""
        if isinstance(self.content, torch.Tensor) and isinstance(now.content, torch.Tensor):
            return self.content.shape != now.content.shape or not torch.equal(self.content, now.content)
        if type(self.value) not in _CONTAINERS:
            return self.versions != now.versions
        if len(self.content) != len(now.content):
            return True
        before, after = (list(c.items() if isinstance(c, dict) else c) for c in (self.content, now.content))
        return any(not _same(a, b) for a, b in zip(before, after, strict=True))

    def is_lost(self, buffers: Collection[int]) -> bool:
        """Whether tensors were changed in place of which there is no copy: it, or some in a container that are no
        ``buffers`` (by their ids), of which there are."""
        if type(self.value) in _CONTAINERS:
            pairs = zip(_members(self.content), self.versions, strict=True)
            return any(_version(member) != then and id(member) not in buffers for member, then in pairs)
        return self.content is None and _version(self.value) != self.versions[0]

    def restore(self) -> None:
        """The place holds again what it held."""
        if self.value is _ABSENT:
            self.home.pop(self.name, None)
            return
        value: Any = self.value
        if type(value) is _StandIn:
            now, there = self.home.get(self.name), value
            value = now if id(now) == there.address and type(now) is type(there.copy) else there.copy
        self.home[self.name] = value
        if self.content is None:
            return
        if isinstance(value, torch.Tensor):
            value.detach().copy_(self.content)
        elif isinstance(value, torch.Generator):
            value.set_state(self.content)
        else:
            value.clear()
            value.extend(self.content) if isinstance(value, (list, deque)) else value.update(self.content)


class _StandIn(NamedTuple):
    """For a container that was at this address, where another is in its place when the unit runs again."""

    address: int
    copy: Any


def without_graphs(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Entries for a recomputation of a forward that has ended, without graphs and the containers that hold them.

    No backward lets go of an auxiliary loss that nobody uses: the call would hold its graph, which holds the call.
    What several attributes share they still do.
    """
    detached, stand_ins = dict[int, torch.Tensor](), dict[int, _StandIn]()
    for entry in entries:
        contains = type(entry.value) in _CONTAINERS
        held = entry.content if contains else entry.value
        # a buffer that is copied, as norms have them in every call, has none
        inside = [] if isinstance(entry.content, torch.Tensor) else tensors_of((entry.value, held))
        if any(tensor.grad_fn is not None for tensor in inside):
            with suppress(RecursionError):  # of what holds itself
                template = flatten(held, found := list[torch.Tensor]())
                free = [detached.setdefault(id(t), t.detach().requires_grad_() if t.grad_fn else t) for t in found]
                held, address = unflatten(template, free), id(entry.value)
                value = stand_ins.setdefault(address, _StandIn(address, copy.copy(held))) if contains else held
                entry = entry._replace(value=value, content=held if contains else None)
        yield entry


def _writes_unseen(module: nn.Module) -> bool:
    """Norms with running statistics, and modules that observe ranges for quantization."""
    if hasattr(module, "track_running_stats"):
        return bool(module.track_running_stats)
    return any(base.__name__ in ("FakeQuantizeBase", "ObserverBase") for base in type(module).__mro__)


def _same(a: Any, b: Any) -> bool:
    """Whether two values are one object, equal numbers, or tuples of such, as the pairs of dictionaries are."""
    if type(a) is tuple and type(b) is tuple:
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (type(a) in _NUMBERS and type(a) is type(b) and a == b)


def _members(value: Any) -> Collection[Any]:
    """What is in a container; of others they themselves."""
    if type(value) not in _CONTAINERS:
        return (value,)
    return value.values() if isinstance(value, dict) else value


def _version(value: Any) -> int:
    return value._version if type(value) in _PLAIN_TENSORS and not value.is_inference() else 0


def _content(value: Any) -> Any:
    if type(value) in _PLAIN_TENSORS:
        plain = value.layout is torch.strided and not (value.requires_grad or value.is_meta or value.is_quantized)
        if not plain or value.nbytes > COPIED_BYTES or not value.untyped_storage().nbytes():
            return None
        with quietly():
            return value.detach().clone()
    if type(value) in _CONTAINERS:
        return copy.copy(value)
    return value.get_state() if type(value) is torch.Generator else None


class ModuleState:
    """What the modules of one unit hold besides parameters. ``unit`` is its name, for messages."""

    def __init__(self, unit: str, module: nn.Module) -> None:
        self._unit = unit
        self.modules = list(module.modules())
        self.fields = [vars(inner) for inner in self.modules]
        # FullyShardedDataParallel puts views of its own in the place of parameters
        self._sharded = {id(f) for f in self.fields if "_is_fsdp_managed_module" in f}
        # Where forwards change something. Kernels of norms write without a new version: those are found by type.
        self.changing: dict[Key, dict[str, Any]] = {}
        for norm in filter(_writes_unseen, self.modules):
            self.changing |= {(id(norm._buffers), name): norm._buffers for name in norm._buffers}
        self._installs = False  # a forward registered hooks

    def take(self) -> list[Entry]:
        """What forwards change, as it is now."""
        return [Entry.of(home, name) for (_, name), home in self.changing.items()]

    def take_all(self) -> dict[Key, Entry]:
        """Everything, as it is now: for a call in which it is learned what changes."""
        places = [(fields["_buffers"], name) for fields in self.fields for name in fields["_buffers"]]
        for fields in self.fields:
            views = torch.Tensor if id(fields) in self._sharded else ()
            places += [(fields, n) for n, v in fields.items() if n not in _NOT_STATE and not isinstance(v, views)]
        # hooks on the unit itself are called around what runs again
        places += [(fields, name) for fields in self.fields[1:] for name in _HOOKS if fields[name]]
        return {(id(home), name): Entry.of(home, name) for home, name in places}

    def learn(self, before: dict[Key, Entry], *, unchecked: int, installed: bool) -> list[Entry]:
        """A forward has ended that began with ``before``. Returns what it changed, or others did, as it was then; but
        where it ``installed`` hooks not those, nor what it made or set to True, as a flag that it has.

        ``unchecked``: calls since the last one in which this was looked at; 0 in the first ones. Raises ConflictError
        where the forward changed what there is no copy of, or began to count in one of these calls.
        """
        after, buffers = self.take_all(), {id(b) for fields in self.fields for b in fields["_buffers"].values()}
        for key in {**before, **after}:
            if key[1] in _HOOKS:
                self.changing[key] = (before.get(key) or after[key]).home
                continue
            then = before.get(key) or Entry(after[key].home, after[key].name, _ABSENT, None, [0])
            now = after.get(key) or Entry(then.home, then.name, _ABSENT, None, [0])
            if not _same(then.value, now.value):
                counts = then.counts_to(now)
            elif then.is_lost(buffers):
                raise self._refusal(then, "changes in place, of which no copy is kept")
            elif now.value is not _ABSENT and then.mutated(now):
                counts = True
            else:
                continue
            if counts and unchecked and key not in self.changing:
                what = f"began to change within the last {unchecked} calls, and may have changed twice"
                raise self._refusal(then, what)
            self.changing[key] = then.home
            before[key] = then
        found = [before[key] for key in self.changing if key in before]
        kept = [e for e in found if not (e.name in _HOOKS or e.value is _ABSENT or e.home.get(e.name) is True)]
        return kept if installed else found

    def _refusal(self, entry: Entry, what: str) -> ConflictError:
        named = self.modules[0].named_modules()
        path = next((path for path, m in named if entry.home is vars(m) or entry.home is m._buffers), "")
        return ConflictError(
            f"{'.'.join(filter(None, (self._unit, path, entry.name)))} is something that the forward of {self._unit} "
            f"{what}, so it cannot run again",
            remedy=f"Use `save` or `offload` on {self._unit}, or change it outside of the forward.",
        )

    def effects(self) -> tuple[int, list[tuple[int, int]]]:
        """How many hooks there are on modules and parameters, and which gradients with their versions."""
        parameters = [p for m in self.modules for p in m._parameters.values() if p is not None]
        hooks = [h for m in self.modules for h in (m._backward_hooks, m._forward_hooks, m._forward_pre_hooks)]
        hooks += [h for p in parameters for h in (p._backward_hooks, p._post_accumulate_grad_hooks) if h]
        grads = (p.grad for p in parameters if p.is_leaf and p.grad is not None)
        return sum(map(len, hooks)), [(id(grad), 0 if grad.is_inference() else grad._version) for grad in grads]

    def installed(self, before: tuple[int, list[tuple[int, int]]]) -> bool:
        """Whether a forward that began with these ``effects`` registered hooks: a first one may, as those of
        transformers' vision towers do. Raises ConflictError where an earlier one did so too, or for gradients that it
        accumulated."""
        hooks, gradients = self.effects()
        installs = hooks != before[0]
        if gradients != before[1] or (installs and self._installs):
            what = "accumulates gradients" if gradients != before[1] else "registers or removes hooks"
            raise ConflictError(
                f"{self._unit} {what} of its modules or parameters in its forward, which recomputing it would repeat",
                remedy=f"Do it outside of the forward, or use `save` on {self._unit}.",
            )
        self._installs |= installs
        return installs

    def restored(
        self, entries: list[Entry], training: list[bool], now: list[bool]
    ) -> AbstractContextManager[Collection[int]]:
        """As in ``entries`` and with these ``training`` flags, and afterwards as ``now``. Yields the storages that are
        written to then: what is saved of them has to be copied."""
        if entries:
            entries = [e for e in entries if e.name not in _HOOKS or e.home[e.name] != e.content]
        return self._restored(entries, training, now) if entries or now != training else nullcontext(())

    @contextmanager
    def _restored(self, entries: list[Entry], training: list[bool], flags: list[bool]) -> Iterator[Collection[int]]:
        # of what is only exchanged, as a weight, nothing is written to
        now = [
            Entry.of(e.home, e.name) if e.content is not None else e._replace(value=e.home.get(e.name, _ABSENT))
            for e in entries
        ]
        tensors = (e.value for e in (*entries, *now) if e.content is not None and isinstance(e.value, torch.Tensor))
        written = tuple(tensors)
        # other graphs depend on the versions of these
        with _unsafe_preserve_version_counter(written):
            try:
                self._restore(entries, training)
                yield {tensor.untyped_storage()._cdata for tensor in written}
            finally:
                self._restore(now, flags)
                for entry in entries:
                    if type(entry.value) is _StandIn:
                        entry.value.copy.clear()  # of what the recomputation has added

    def _restore(self, entries: list[Entry], training: list[bool]) -> None:
        for fields, flag in zip(self.fields, training, strict=True):
            fields["training"] = flag
        with torch.no_grad():
            for entry in entries:
                entry.restore()
