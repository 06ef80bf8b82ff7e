"""The state of a unit, looked at whole: what its forward changes is found as it was when it runs again, and is
afterwards as it was before that.

On a unit's first calls, and anew when its modules are others, all that can be reached is looked at closely; of units
whose code may write to tensors unseen, on every call. What has not changed by then is later only compared: which
objects they are, and versions and memory of tensors. What changes is copied before each forward.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import CellType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as all_modules

from autockpt.checkpointing.fingerprint import stream_of
from autockpt.errors import ConflictError, InPlaceError
from autockpt.policies.rerun_state.code import Code
from autockpt.policies.rerun_state.kinds import ABSENT, Fields, Parameters
from autockpt.policies.rerun_state.libraries import registered
from autockpt.policies.rerun_state.reach import ARGUMENT, HOOKS, TYPE, Global, Node, Walk, changed_of, said
from autockpt.policies.rerun_state.tensors import (
    TENSORS,
    NotPutBackError,
    TensorTaken,
    fingerprint,
    is_small,
    place_of,
    still_holds,
    without_values,
)
from autockpt.policies.watching import Unread

_FIRST_CALLS = 2
_RESTLESS = 3  # times that something may be found changed from outside before it counts as changing
_set_version: Any = torch._C._autograd._unsafe_set_version_counter  # type: ignore[attr-defined]
_contents = operator.attrgetter("cell_contents")
_EVERYWHERE = (all_modules._global_forward_hooks, all_modules._global_forward_pre_hooks)


class Memory:
    """What a unit's calls taught about its state. Copied and pickled with the unit, but for the objects."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.lively: set[str] = set()
        self.restless: Counter[str] = Counter()
        self.calls = {True: 0, False: 0}  # by the unit's `training`
        self.code = Code()
        self._cache_quiet: Quiet | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache_quiet": None}

    def quiet(self, module: nn.Module) -> Quiet | None:
        """What has not changed so far; None where the unit is to be looked at closely: on its first calls, where its
        code may write unseen, and where somebody has changed something, after which it may do what it did not."""
        quiet = self._cache_quiet if self._knows(module) else None
        changed = quiet.changed() if quiet is not None else []
        for node in changed:
            self.restless[node.name] += 1
            if self.restless[node.name] > _RESTLESS:
                self.lively.add(node.name)
        self._cache_quiet = None if changed else quiet
        return self._cache_quiet

    def note_quiet(self, module: nn.Module) -> None:
        """A forward has ended that was looked at closely, or changed something for the first time. What is quiet is
        noted now, so that the next call sees what somebody changes before it."""
        self._cache_quiet = Quiet(self.unit, module, self.lively) if self._knows(module) else None

    def in_mid_training(self) -> None:
        """Look closely at one more call only."""
        self.calls = dict.fromkeys(self.calls, _FIRST_CALLS - 1)

    def _knows(self, module: nn.Module) -> bool:
        return self.calls[module.training] >= _FIRST_CALLS and not self.code.writes_unseen


class Quiet:
    """All that a unit reaches and that no forward has changed: ``lively`` is what some did."""

    def __init__(self, unit: str, module: nn.Module, lively: set[str]) -> None:
        self.inside = {id(inner) for inner in module.modules()}
        walk = Walk(unit, self.inside, (), lively, close=False)
        walk.from_unit(_roots(module))
        firm = [node for node in walk.nodes if not node.loose]
        self.lively = [node._replace(taken=None) for node in firm if node.name in lively]
        tensors = [node for node in firm if node.kind is TENSORS and node.name not in lively]
        self.tensors, self.small = ([n for n in tensors if is_small(n.obj) is small] for small in (False, True))
        self.nodes = [node for node in firm if node.kind is not TENSORS and node.name not in lively]
        self._fixed = walk.fixed  # by whose ids they are known
        kept = [node for node in self.nodes if not isinstance(node.kind, Global)]
        self.known = (walk.fixed.keys() | {id(node.obj) for node in kept}) - {id(node.obj) for node in self.lively}
        self._others, self._cells, self._typed = list[Node](), list[CellType](), list[Any]()
        self._views, self._inner = list[Any](), list[Any]()  # the second of dictionaries whose keys are in the first
        self._getters: list[tuple[Callable[[Any], tuple[Any, ...]], dict[str, Any]]] = []
        for node in kept:
            kind = node.kind
            if node.name.endswith(HOOKS):  # they go with the hooks themselves
                continue
            if isinstance(kind, Fields):
                left = {*kind.hidden, *HOOKS} if kind.hidden else ()
                # those of other classes may look up in ways of their own
                by_key = not kind.ordered and type(node.obj) in (dict, OrderedDict)
                keys = [key for key in node.taken if key not in left] if by_key else []
                if keys:
                    self._getters.append((operator.itemgetter(*keys, keys[0]), node.obj))
                else:
                    self._views.append(kind.keys(node.obj))
                    self._inner += [] if by_key else [dict.values(node.obj)]
            elif issubclass(type(node.obj), type):
                self._views.append(vars(node.obj).values())
            elif type(node.obj) is list:
                self._views.append(node.obj)
            elif type(node.obj) is CellType:
                self._cells.append(node.obj)
            elif kind is TYPE:
                self._typed.append(node.obj)
            else:
                self._others.append(node)
        self._sized = [*self._views, *(fields for _, fields in self._getters)]
        homes = {id(node.obj): node.obj for node in self.nodes if isinstance(node.kind, Global)}
        there, absent = ({key: list[str]() for key in homes} for _ in range(2))
        for node in self.nodes:
            if isinstance(node.kind, Global):
                (absent if node.taken[node.kind.key] is ABSENT else there)[id(node.obj)].append(node.kind.key)
        self._getters += [(operator.itemgetter(*keys, keys[0]), homes[key]) for key, keys in there.items() if keys]
        self._absent = [(homes[key].keys(), frozenset(keys)) for key, keys in absent.items() if keys]
        self._tensors = [node.obj for node in self.tensors]
        self._learn()

    def _learn(self) -> None:
        self._full = [view for view in (*self._views, *self._inner) if len(view)]
        self._lengths = list(map(len, self._sized))
        try:
            self._values: list[Any] | None = list(self._now())
        except (KeyError, ValueError):  # a global that is gone, an empty cell
            self._values = None

    def _now(self) -> Iterator[Any]:
        parts = itertools.chain(self._full, [get(home) for get, home in self._getters])
        return itertools.chain(*parts, map(_contents, self._cells), map(type, self._typed))

    def _same(self) -> bool:
        """Whether all that is in containers is the very same. No slower than it must be: every call asks twice."""
        if self._values is None or list(map(len, self._sized)) != self._lengths:
            return False
        if self._absent and not all(names.isdisjoint(keys) for names, keys in self._absent):
            return False
        try:
            return all(map(operator.is_, self._now(), self._values))
        except (KeyError, ValueError):
            return False

    def changed(self) -> list[Node]:
        """Those that hold something else now. Tensors are not among them: they may change between calls."""
        if self._same():
            return [node for node in self._others if not node.unchanged()]
        changed = [node for node in self.nodes if not node.unchanged()]
        if not changed:  # other objects of the same value
            self._learn()
        return changed

    def marks(self) -> list[tuple[int, int, bool]]:
        """What tells of each tensor that it was changed: version, memory, whether it needs a gradient."""
        return [(tensor._version, place_of(tensor), tensor.requires_grad) for tensor in self._tensors]


class UnitState:
    """What one call of a unit reaches, ``objects`` among its arguments included. Made before its forward."""

    def __init__(
        self, memory: Memory, module: nn.Module, objects: Sequence[Any], tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        self._memory, self._module, self._training = memory, module, module.training
        self._quiet = quiet = memory.quiet(module)
        arguments = [(ARGUMENT, value) for value in objects]
        if (quiet is None or ARGUMENT in memory.lively) and not without_values():
            arguments += [(ARGUMENT, tensor) for tensor in tensors]
        self._marks: list[tuple[int, int, bool]] = []
        if quiet is None:
            inside = {id(inner) for inner in module.modules()}
            walk = Walk(memory.unit, inside, (), memory.lively, close=True)
            memory.code = walk.from_unit(_roots(module))
            self._still = walk.run(arguments)
            for name in walk.passing:
                raise _passing(memory.unit, name)
        else:
            self._marks = quiet.marks()
            small = quiet.small
            self._still = [node._replace(taken=TENSORS.glance(node.obj)) for node in small] if small else []
            if quiet.lively or arguments:
                walk = Walk(memory.unit, quiet.inside, quiet.known, memory.lively, close=None)
                self._still += walk.run(arguments, quiet.lively)
        self._changing: list[Node] = []
        self._versions: dict[int, int] = {}
        self.doubts: list[Node] = []  # tensors without a copy that the forward wrote to
        self._lost: dict[int, ConflictError] = {}  # by tensor: it changed for the first time, so nobody had a copy
        self._over = False
        self.moved: dict[int, int] = {}

    def after(self) -> None:
        """The forward has ended. Raises ConflictError where it did what cannot be done twice."""
        memory, quiet = self._memory, self._quiet
        memory.calls[self._training] += quiet is None
        known = len(memory.lively)
        try:
            self._learn()
        finally:
            if quiet is None or len(memory.lively) > known:
                memory.note_quiet(self._module)

    def _learn(self) -> None:
        """See what the forward has changed. Raises ConflictError where that cannot be done twice."""
        memory, quiet = self._memory, self._quiet
        changed, tensors = self._changed(), self._changed_tensors()
        if changed and any(node.kind is TENSORS and node.taken.glanced for node in changed):
            # all that there are copies of: of running statistics only their number has a version that tells
            changed += [node for node in self._still if node.kind is TENSORS and node.taken.glanced]
            changed = [*{id(node): node for node in changed}.values()]
        self._over = True
        if not (changed or tensors or self._still):
            return
        self.doubts = [node for node in changed if _written_unseen(node)]
        doubts, known = set(map(id, self.doubts)), set(memory.lively)
        changed = [node for node in changed if id(node) not in doubts]
        memory.lively.update(node.name for node in (*changed, *tensors))
        for node in (*changed, *tensors):
            if node.kind is TENSORS and node.taken.alias is None and quiet is not None and node.name not in known:
                self._lost[id(node.obj)] = _began(memory.unit, node)
            else:
                _refuse(memory.unit, node)
        new = {id(node) for node in changed}
        detached: dict[int, torch.Tensor] = {}
        # what changes at times may now hold what it held: its second run must find it so and leave it so all the same
        changed += [node for node in self._still if node.name in memory.lively and id(node) not in new]
        self._changing = [_without_graphs(node, detached) for node in changed]
        still = [node for node in self._still if node.name not in memory.lively and id(node) not in doubts]
        self._still = [_trimmed(n) for n in still if n.name != ARGUMENT or n.kind is not TENSORS]
        self._versions = {id(node.obj): node.obj._version for node in changed if node.kind is TENSORS}

    def tensors(self) -> list[torch.Tensor]:
        """All that the unit reaches, before its forward has ended."""
        nodes = (*self._still, *(self._quiet.tensors if self._quiet is not None else ()))
        return [node.obj for node in nodes if node.kind is TENSORS]

    def changes(self) -> set[int]:
        """The ids of what the forward has changed and its second run finds as it was, or is refused for."""
        return {id(node.obj) for node in self._changing} | self._lost.keys()

    def judge_doubts(self, same: bool) -> None:
        """Whether the unit did the same again. Raises ConflictError where it did not."""
        doubts, self.doubts = self.doubts, []
        for node in doubts:
            if not same:
                _refuse(self._memory.unit, node)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As before the forward, and in the end as now. Raises InPlaceError where there is no way back."""
        nodes = changed_of(self._still) if self._over else [*self._still]
        if self._quiet is not None:
            nodes += [*self._quiet.changed(), *self._changed_tensors()]
        # which parameters a module has is looked after by the replay, as FSDP exchanges them
        nodes = [*self._changing, *(node for node in nodes if not isinstance(node.kind, Parameters))]
        held = [node._replace(taken=node.kind.take(node.obj, close=True)) for node in nodes]
        unread, forwards = None, list[Node]()
        try:
            for node in nodes:
                try:
                    if node.kind.goes_back:
                        node.kind.put(node.obj, node.taken)
                except NotPutBackError as cause:
                    by_itself = node.kind is not TENSORS and any(node is own for own in self._changing)
                    refusal = _advances if by_itself else _changed_between
                    error = self._lost.get(id(node.obj)) or refusal(self._memory.unit, node)
                    if node.kind is not TENSORS or not place_of(node.obj):
                        raise error from cause
                    unread = unread or Unread(self._memory.unit)
                    unread.add(node.obj, error, views=place_of(node.obj) == node.taken.place)
            only = [node for node in nodes if not node.kind.goes_back]
            forwards = [node._replace(taken=node.kind.take(node.obj, close=True)) for node in only]
            with unread or nullcontext():
                yield
        finally:
            # a run that ends early may not come that far
            advanced = [node for node in forwards if not node.unchanged()] + self._put_back(held)
            self._undo(nodes)
            for node in advanced:
                raise _advances(self._memory.unit, node)

    def _undo(self, seen_to: list[Node]) -> None:
        """What the second run alone has changed, as one that ends early passes by handlers of errors."""
        if not self._memory.code.handles_errors:
            return
        known = set(map(id, seen_to))
        for node in self._changed():
            if id(node) not in known and node.kind is not TENSORS and node.kind.goes_back:
                with suppress(NotPutBackError):
                    node.kind.put(node.obj, node.taken)

    def _changed(self) -> list[Node]:
        """Those that are not as they were, but for tensors that are known to be quiet."""
        return changed_of(self._still) + (self._quiet.changed() if self._quiet is not None else [])

    def _changed_tensors(self) -> list[Node]:
        """Those that are known to be quiet otherwise and were changed since the forward began, as they were then."""
        quiet = self._quiet
        if quiet is None or (now := quiet.marks()) == self._marks:
            return []
        trios = zip(quiet.tensors, self._marks, now, strict=True)
        return [node._replace(taken=TensorTaken(*before)) for node, before, after in trios if before != after]

    def _put_back(self, held: list[Node]) -> list[Node]:
        """All as it was, but for those that are returned."""
        stuck: list[Node] = []
        for node in reversed(held):
            if node.kind is TENSORS and (end := node.obj._version) != node.taken.version:
                # other graphs go by it; slots that this run filled follow
                _set_version((node.obj,), (node.taken.version,))
                if node.taken.version == self._versions.get(id(node.obj)):
                    self.moved[end] = node.taken.version
            try:
                if node.kind.goes_back:
                    node.kind.put(node.obj, node.taken)
            except NotPutBackError:
                stuck.append(node)
        return stuck


def _roots(module: nn.Module) -> list[tuple[str, Any]]:
    everywhere = [("the hooks of all modules", _EVERYWHERE), ("the registered functions", registered())]
    return [("", module), ("the environment", os.environ._data), *everywhere]  # type: ignore[attr-defined]


def _refuse(unit: str, node: Node) -> None:
    """Raise ConflictError where what a forward has changed is a tensor that nobody has a copy of."""
    taken, now = node.taken, node.obj
    if node.kind is not TENSORS or (taken.alias is not None and taken.bits is not None):
        return
    if taken.version != now._version or not still_holds(taken):
        raise ConflictError(
            f"{unit} changes one of its {'inputs' if node.name == ARGUMENT else 'parameters'}, "
            f"{said(unit, node.name)} (shape {tuple(now.shape)}), in place, so its forward cannot be run again",
            remedy=f"Use `save`, `offload` or `remake` on {unit}, or change it outside of the forward.",
        )


def _began(unit: str, node: Node) -> ConflictError:
    return ConflictError(
        f"{said(unit, node.name)} is a tensor that this forward changed in place and earlier ones did not, so this "
        "once it cannot run again",
        remedy="Clear the gradients and run the step again: from now on what was in it is kept.",
    )


def _passing(unit: str, name: str) -> ConflictError:
    return ConflictError(
        f"{said(unit, name)} is a weak reference to an activation, which may be gone when the forward of {unit} runs "
        "again",
        remedy=f"Use `save` on {unit}, or hold the tensor itself.",
    )


def _advances(unit: str, node: Node) -> ConflictError:
    return ConflictError(
        f"{unit} advances {said(unit, node.name)} ({type(node.obj).__name__}), which cannot be put back to run its "
        "forward again",
        remedy=f"Use `save`, `offload` or `remake` on {unit}, or draw from it outside and hand in what was drawn.",
    )


def _written_unseen(node: Node) -> bool:
    taken = node.taken
    if node.kind is not TENSORS or taken.alias is None or taken.bits is not None or taken.version != node.obj._version:
        return False
    return not still_holds(taken)


def _changed_between(unit: str, node: Node) -> InPlaceError:
    return InPlaceError(
        f"{said(unit, node.name)} was changed in place between forward and backward, and {unit} would run again with "
        "another value",
        remedy=f"Change it after backward, or use `save` on {unit}.",
    )


def _trimmed(node: Node) -> Node:
    """Without copies: it did not change, and only whether it does until backward is still to be seen."""
    if node.kind is not TENSORS:
        return node
    taken = node.taken._replace(alias=None, bits=None)
    if node.taken.bits is not None and not taken.glanced:
        taken = taken._replace(print=fingerprint(node.obj), stream=stream_of(node.obj.device))
    node = node._replace(taken=taken)
    if node.obj.is_leaf:
        return node
    return node._replace(obj=node.obj.detach(), taken=node.taken._replace(trains=False))


def _without_graphs(node: Node, known: dict[int, torch.Tensor]) -> Node:
    """With no tensor that holds a graph."""

    def free(value: Any) -> Any:
        if not issubclass(type(value), torch.Tensor) or value.is_leaf:
            return value
        return known.setdefault(id(value), value.detach().requires_grad_(value.requires_grad))

    taken = node.taken
    if type(taken) is dict:
        return node._replace(taken={key: free(value) for key, value in taken.items()})
    if type(taken) in (list, deque):
        return node._replace(taken=type(taken)(map(free, taken)))
    return node
