"""Rematerialization: recompute single saved tensors in backward, by recipes.

The first calls of a signature are recorded op by op and yield a recipe (which tensors to drop, which ops recompute
them). Later calls follow the recipe, with hooks on saved tensors alone. After 4, 8, … 256, 511 calls one is recorded
again and compared. If recordings keep differing, every call is recorded.

For example ``down(silu(up(x)))`` with matrix products kept. Autograd saves five tensors, so the recipe has five
positions::

    0  x               kept
    1  weight of up    kept
    2  h = up(x)       kept, in cell 0
    3  silu(h)         dropped: value 0, from group 0
    4  weight of down  kept

    groups    0: (cell 0,)
    programs  value 0: value 1 is what cell 0 holds; value 0 = aten.silu(value 1)

``pack`` of position 3 returns its number and what cell 0 holds; ``unpack`` runs the program of value 0 on that.

- cell: a slot of the call for a kept tensor that programs read.
- group: the cells that a dropped tensor is recomputed from. Tensors with the same cells share one.
- tap: a hook on a module inside the unit. It puts an argument or output, which autograd need not save, into a cell.
- turn: which call of that module within the unit's forward, counted from 0.

A recorded call holds what it saves until it ends, then drops it by its own recipe: it is right whatever it does. A call
that follows a recipe keeps everything from the first tensor of another form on. A unit that changes what it does but
not the forms of what it saves is found at the latest in the call after ``LONGEST`` others. If two recordings differ
before a call has followed either, more of them must agree. Once a unit is known to be steady, one recording of a new
signature is enough: batches without padding have a new length in each step.

Ownership: a node of the graph holds what ``pack`` returned for it, and the call by its ``unpack``. The sources of a
dropped tensor are in what ``pack`` returned, not in the call: they die with the nodes that need them.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Number
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten  # torch has no public one

from autockpt.checkpointing.arguments import ATOMS, Held, hold, unpack
from autockpt.checkpointing.divergence import FIRST_CALLS, UnitCheck
from autockpt.checkpointing.fingerprint import stream_of
from autockpt.checkpointing.op_recorder import OpRecorder
from autockpt.checkpointing.recipes import SMALL, Instruction, Planner, Position, Program, Recipe, form_of, laid_out
from autockpt.checkpointing.replay_context import (
    AutocastState,
    autocast_is_on,
    one_at_a_time,
    running_again,
    set_switches,
    switches,
)
from autockpt.checkpointing.unit import CallKind, CheckpointedUnit
from autockpt.errors import InPlaceError, RerunMismatch

_C: Any = torch._C
_MISSES = 3
"""So often may calls of a kind turn out to do something else; from then on each is recorded."""
_MOST = 64
"""Signatures of a unit whose recipes are known at a time."""
_NUMBERS = (Number, str, Enum, range, type(None))
"""What tells calls apart by its value, NumPy's numbers among it."""
_MAY_BECOME_ONE = (*_NUMBERS, tuple, list, dict, torch.Tensor)
_OF_ALL_MODULES = frozenset(vars(nn.Module())) - {"training"}
_NOTHING = nullcontext()
_KEPT = Position(None)
_BEYOND = Position((torch.Size((-1,)), (), torch.bool))  # no tensor is like it
_kind_of = operator.attrgetter("shape", "dtype", "requires_grad", "is_leaf", "device", "__class__")
_stride_of: Callable[[torch.Tensor], tuple[int, ...]] = operator.methodcaller("stride")


class Signature:
    """Calls of one signature. So many recordings in a row ``agreed`` on the ``recipe``, and so many calls have
    ``followed`` it since the last one."""

    def __init__(self, kind: CallKind) -> None:
        self.kind = kind
        self.recipe: Recipe | None = None
        self.agreed = self.followed = 0


class RecordedUnit(CheckpointedUnit):
    """A module whose calls follow recipes, as its modules are now.

    ``recording_mode`` makes a dispatch mode that hands ops to a recorder. ``keeps``: whether an expensive op must not
    run again. ``named``: modules that the choice names, inside of which no expensive op may run again (``keep``), or
    outside of which no op may (``within``). ``compares``: calls that follow a recipe are recorded again now and then.
    """

    gap: ClassVar[int] = 4  # calls that follow a recipe before one is recorded again

    def __init__(
        self,
        name: str,
        module: nn.Module,
        check: UnitCheck,
        recording_mode: Callable[[OpRecorder], AbstractContextManager[Any]],
        keeps: Callable[[Any], bool],
        named: Mapping[nn.Module, str],
        *,
        compares: bool,
    ) -> None:
        super().__init__(name, module, check)
        self.recording_mode, self.keeps, self.named = recording_mode, keeps, named
        self.everywhere = "within" not in self.named.values()
        self.modules = modules = self.state.modules
        places = [(home, n) for m in modules for home in (m._parameters, m._buffers) for n in home]
        # FullyShardedDataParallel puts views of its own in the place of parameters
        places += [(home, n) for home in self.state.fields for n, v in home.items() if isinstance(v, torch.Tensor)]
        self.weights: list[tuple[dict[str, Any], str]] = places
        self._hooks = [hooks for m in modules[1:] for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._counts = list[int]()
        self._compares = compares
        self.signatures: dict[Any, Signature] = {}

    def next_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Signature, list[torch.Tensor], bool]:
        """A call begins: its signature, the tensors that it is given, and whether it is to be recorded."""
        tensors: list[torch.Tensor] = []
        key: Any = None
        try:
            weights = [home.get(name) for home, name in self.weights]
            # which of them train, and are one, decides what is saved; hooks may do anything
            trains = map(getattr, weights, itertools.repeat("requires_grad"), itertools.repeat(False))
            key = *self._key(args, kwargs, tensors), *trains, len({*map(id, weights)}), *map(tuple, self._hooks)
            signature = self.signatures.get(key)
        except (RuntimeError, TypeError):  # sparse and the like have no storage, and jagged sizes no hash
            key = signature = None
        if signature is None:
            signature = Signature(self.kind_of(tensors, self.training()))
            if key is not None:  # without one nothing tells whether another call's recipe holds
                if len(self.signatures) >= _MOST:
                    del self.signatures[next(iter(self.signatures))]
                self.signatures[key] = signature
        kind = signature.kind
        is_due = kind.schedule.next() is not None and self._compares
        # so many recordings have to agree before calls follow the recipe
        is_steady = (kind.is_steady or self.check.sentinels.in_mid_training) and not kind.misses
        needed = 1 if is_steady else FIRST_CALLS * 4**kind.misses
        return signature, tensors, is_due or kind.misses >= _MISSES or signature.agreed < needed

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]) -> tuple[Any, ...]:
        """What tells this call's recipe from others': arguments, numbers, modes, and which tensors share memory."""
        rest = _plain_parts(args, tensors), _plain_parts(kwargs, tensors)
        autocast = AutocastState(sorted({t.device.type for t in tensors})).key if autocast_is_on() else None
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        shared: Any = None
        if len(set(storages)) < len(storages):
            shared = (*map(storages.index, storages), *[tensor.storage_offset() for tensor in tensors])
        return *rest, self.numbers(), autocast, shared, *map(_kind_of, tensors), *map(_stride_of, tensors)

    def numbers(self) -> tuple[Any, ...]:
        """Numbers and flags among the modules' attributes, as they are now; of what else is there now the type.

        A scale that is changed from step to step is an argument of an op. No saved tensor's form shows it.
        """
        fields = self.state.fields
        if self._counts != (counts := [*map(len, fields)]):  # attributes were set for the first time
            self._counts = counts
            named = [(home, n) for home in fields for n, v in home.items() if isinstance(v, _MAY_BECOME_ONE)]
            self._numbers = [(home, name) for home, name in named if name not in _OF_ALL_MODULES]
        values = [home.get(name) for home, name in self._numbers]
        return tuple([v if type(v) in ATOMS else _numbers_in(v) for v in values])

    def leave_out_changed(self, before: tuple[Any, ...]) -> None:
        """A forward has ended that began with these numbers: such as it changed, as a counter, tell no calls apart."""
        if before != (now := self.numbers()):
            if len(before) == len(now):
                triples = zip(self._numbers, before, now, strict=True)
                self._numbers = [place for place, then, here in triples if then == here]
            self.signatures.clear()

    def learn(self, signature: Signature, recipe: Recipe) -> None:
        """A call was recorded. Raises RerunMismatch where calls since the last recording followed another recipe."""
        before, followed = signature.recipe, signature.followed
        signature.recipe, signature.followed = recipe, 0
        if before is None or before.content == recipe.content:
            signature.recipe = before or recipe  # one object for all calls
            signature.agreed += 1
            signature.kind.is_steady |= signature.agreed >= FIRST_CALLS
        else:
            signature.kind.misses, signature.agreed = signature.kind.misses + 1, 1
            # calls that saved tensors of other forms have not followed it
            if followed and [p.form for p in before.positions] == [p.form for p in recipe.positions]:
                signature.recipe = None
                raise RerunMismatch(
                    f"{self.name} has changed within the last {followed} calls what it does, and what backward "
                    "rematerialized in these calls may be wrong",
                    remedy=f"Use `recompute` or `save` on {self.name}: a number, a flag or a tensor that its forward "
                    "reads from outside of its modules is not what it was. Go back to a checkpoint from before.",
                )
        if recipe.is_dynamic:  # its Python may depend on values
            signature.kind.misses = _MISSES

    def drop_recipe(self, signature: Signature) -> None:
        """A call that followed the recipe has saved something else."""
        signature.kind.misses += 1
        signature.recipe, signature.agreed, signature.followed = None, 0, 0


def _numbers_in(value: Any) -> Any:
    """A number, those in a container of a few (PEFT has a scale for each adapter in a dictionary), or the type."""
    kind = type(value)
    if isinstance(value, _NUMBERS):
        return kind, value
    if isinstance(value, tuple):  # of any length, and of tuples
        return kind, *[part if type(part) in ATOMS else _numbers_in(part) for part in value]
    if not isinstance(value, (list, dict)) or len(value) > _MOST:
        return kind
    parts = (*value, *value.values()) if isinstance(value, dict) else value
    return kind, *[part if type(part) in ATOMS or isinstance(part, _NUMBERS) else type(part) for part in parts]


def _plain_parts(value: Any, tensors: list[torch.Tensor]) -> Any:
    """What tells one call's arguments from another's besides their tensors, which are appended to the list."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if issubclass(kind, torch.Tensor):
        tensors.append(value)
        return kind
    if kind is tuple or kind is list:
        return kind, *[part if type(part) in ATOMS else _plain_parts(part, tensors) for part in value]
    if kind is dict:
        parts = value.values()
        return kind, *value, *[part if type(part) in ATOMS else _plain_parts(part, tensors) for part in parts]
    if isinstance(value, _NUMBERS):
        return kind, value
    if kind is slice:
        return kind, value.start, value.stop, value.step
    parts = {field.name: getattr(value, field.name) for field in fields(value)} if is_dataclass(kind) else value
    leaves, spec = tree_flatten(parts)
    return kind if spec.is_leaf() else (kind, spec, *[_plain_parts(leaf, tensors) for leaf in leaves])


class RecordedCall:
    """One call of ``unit`` with these arguments. ``is_recorded``, or by a recipe."""

    __slots__ = (
        *("_cells", "_inputs", "_left", "_memo", "_observer", "_recipe", "_signature", "_sources"),
        *("_stream", "_tensors", "_unit", "_upcoming", "_weights", "is_recorded"),
    )

    def __init__(self, unit: RecordedUnit, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._unit = unit
        self._signature, self._tensors, self.is_recorded = signature, _, _ = unit.next_call(args, kwargs)
        self._observer = unit.check.observer(new=signature.recipe is None)
        self._memo: dict[int, torch.Tensor] = {}  # values that were made, until every position has them
        self._left: dict[int, int] | None = None  # positions that wait for a value
        self._stream: Any = None  # that they were made on
        if not self.is_recorded:
            assert signature.recipe is not None
            self._follow(signature.recipe, [home.get(name) for home, name in unit.weights])

    def _follow(self, recipe: Recipe, weights: Sequence[torch.Tensor | None]) -> None:
        """Take what the recipe starts from."""
        self._recipe = recipe
        self._upcoming = itertools.chain(recipe.positions, itertools.repeat(_BEYOND))
        self._cells: list[Any] = [None] * recipe.cells
        self._sources: list[tuple[Any, ...] | None] = [None] * len(recipe.groups)  # what is in their cells
        inputs = hold([self._tensors[number] for number in recipe.inputs])
        self._inputs: dict[int, Held] = dict(zip(recipe.inputs, inputs, strict=True))
        self._weights: dict[int, tuple[torch.Tensor, int]] = {}
        for number, form in recipe.weights.items():
            weight = weights[number]
            if weight is None or (weight.shape, weight.stride(), weight.dtype) != form:
                self._keep_the_rest()
                break
            self._weights[number] = weight.detach(), weight._version  # other memory may be assigned to its `.data`

    # In forward.

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The forward. Raises RerunMismatch where the call shows that earlier ones were not given what they had
        computed."""
        if self.is_recorded:
            output = self._record(forward, args, kwargs)
        else:
            recipe = self._recipe
            with saved_tensors_hooks(self.pack, self.unpack):
                if recipe.taps:
                    with tapping(self._unit, recipe.taps, self._take):
                        output = forward(*args, **kwargs)
                else:
                    output = forward(*args, **kwargs)
            self._signature.followed += 1
            if next(self._upcoming) is not _BEYOND:
                self._unit.drop_recipe(self._signature)
        self._tensors, self._cells, self._sources = [], [], []
        if self._observer is not None:
            self._observer.forward_ended()
        return output

    # What autograd is given in the place of a saved tensor is one of two:
    #   (tensor, version)                          a kept tensor, and its version when it was saved
    #   (position, comparison or None, cells)      a dropped one: its place in the recipe, what compares it, the tensors
    #                                              that it is made from
    # A recorded call has no recipe yet. It hands out [tensor, version, stream], and keeps these lists: when its forward
    # has ended, those of dropped tensors get the second content in place.

    def pack(self, tensor: torch.Tensor) -> Any:
        """The hook for what autograd saves.

        Of a kept tensor the tensor and its version; of a dropped one its number, what compares it, and cells: what of
        this call is kept, and it is made from. Kept is not its graph, which it would keep alive by way of Python; but
        leaves themselves, as autograd holds them, with what was set on them.
        """
        # No function is called that need not be: a layer saves dozens of tensors.
        form, cell, weight, number, _, _, group = next(self._upcoming)
        if form is not None and (tensor.shape != form[0] or tensor.stride() != form[1] or tensor.dtype is not form[2]):
            cell = self._keep_the_rest()
        elif group is not None:
            if (sources := self._sources[group]) is None:
                sources = tuple([self._cells[cell] for cell in self._recipe.groups[group]])
                if None in sources:
                    sources = self._keep_the_rest()  # a module inside was not called, or with another tensor
                self._sources[group] = sources
            if sources is not None:
                return number, None if self._observer is None else self._observer.look_at(number, tensor), sources
        elif weight is not None:
            # FullyShardedDataParallel has all weights in one storage
            home, name = self._unit.weights[weight[0]]
            there = home.get(name)
            if there is not None and tensor.data_ptr() - there.data_ptr() == weight[1]:
                return tensor, tensor._version  # its graph is the weight
            self._keep_the_rest()
        kept = tensor if tensor.is_leaf else tensor.detach(), tensor._version
        if cell is not None:
            self._cells[cell] = kept
        return kept

    def _keep_the_rest(self) -> None:
        """The call does something else: keep all from here on."""
        self._upcoming = itertools.repeat(_KEPT)

    def _take(self, number: int, turn: int, tensors: Sequence[Any]) -> None:
        """A module inside is given, or returns, these tensors."""
        for nth, argument, cell, form in self._recipe.taps[number]:
            tensor = tensors[argument] if nth == turn and argument < len(tensors) else None
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and form_of(tensor) == form:
                self._cells[cell] = tensor.detach(), tensor._version

    def _record(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The forward, recorded. What it saves is held until it ends, and then dropped by the recipe."""
        unit, numbers, slots = self._unit, self._unit.numbers(), list[list[Any]]()
        weights = [home.get(name) for home, name in unit.weights]
        recorder = OpRecorder(self._tensors, weights, unit.keeps, everywhere=unit.everywhere)
        pack = functools.partial(self.hold, recorder, slots)
        with saved_tensors_hooks(pack, self.unpack), recording(unit, recorder):
            output = forward(*args, **kwargs)
        small = max((t.nbytes for t in self._tensors if t.layout is torch.strided), default=0) // SMALL
        recipe = Planner(recorder, small).recipe
        self._follow(recipe, weights)
        for module, taps in recipe.taps.items():
            for turn, argument, cell, _ in taps:
                self._cells[cell] = recorder.tapped[module, turn, argument]  # type: ignore[index]
        for number, (slot, position) in enumerate(zip(slots, recipe.positions, strict=True)):
            if position.cell is not None:
                self._cells[position.cell] = slot[:2]
            elif position.group is not None:
                # what was made on another stream may be freed there before this one has read it
                looks = self._observer is not None and stream_of(slot[0].device) == slot[2]
                comparison = self._observer.look_at(number, slot[0]) if looks else None  # type: ignore[union-attr]
                slot[:] = number, comparison, tuple([self._cells[cell] for cell in recipe.groups[position.group]])
        recorder.forget()
        unit.learn(self._signature, recipe)
        unit.leave_out_changed(numbers)
        return output

    def hold(self, recorder: OpRecorder, slots: list[list[Any]], tensor: torch.Tensor) -> Any:
        """The hook for what autograd saves in a recorded call."""
        recorder.save(tensor)
        slots.append([tensor if tensor.is_leaf else tensor.detach(), tensor._version, stream_of(tensor.device)])
        return slots[-1]

    # In backward.

    def unpack(self, packed: Any) -> torch.Tensor:
        """The hook for what backward asks for. Raises InPlaceError where something was changed that it needs."""
        first, comparison = packed[0], packed[1]
        if type(first) is not int:
            if first._version != comparison:
                raise self._in_place(first, comparison)
            return first
        recipe = self._recipe
        position = recipe.positions[first]
        if comparison is not None:
            comparison.look_again()
        if self._stream is not None and stream_of(self._stream.device) != self._stream:
            self._memo.clear()  # made for a node that ran on another stream
        base = self._memo.get(position.value)
        if base is None:
            base = self._make(position.value, packed[2])
        # after the last position that has a value, a further backward may begin
        if self._left is None:
            self._left = dict(recipe.uses)
        self._left[position.value] -= 1
        if not self._left[position.value]:
            self._memo.pop(position.value, None)
            self._left[position.value] = recipe.uses[position.value]
        tensor = base if position.view is None else laid_out(base, position.view)
        if comparison is not None:
            comparison.handed(tensor)
        return tensor

    def _make(self, wanted: int, cells: Sequence[Any]) -> torch.Tensor:
        """Run the ops that lead to a value, and keep what they make for other positions.

        Below autograd and autocast: ops do just what their call says. Gradients count as enabled, as whenever a unit
        runs again.
        """
        recipe = self._recipe
        program, values = recipe.programs[wanted], dict[int, torch.Tensor]()
        left = self._instructions_left(program, wanted, values) if self._memo else program.instructions
        whole = len(left) == len(program.instructions)
        readers = program.reads.copy() if whole else Counter([value for each in left for value in each.reads])
        self._take_sources(program, cells, readers, values)
        readers[wanted] += 1  # who is given it
        uses, memo = recipe.uses, self._memo
        below, uncast, plain = _C._AutoDispatchBelowAutograd(), _C._DisableAutocast(), _C.DisableTorchFunction()
        now, unit = switches(), self._unit.name
        alone = _NOTHING if now == recipe.switches else one_at_a_time(unit)  # they belong to the process
        with below, uncast, plain, running_again(unit), torch.enable_grad(), alone:
            set_switches(recipe.switches, now)
            try:
                for each in left:
                    made = each.run(values)
                    for index, value in each.outputs:
                        tensor = made[index] if type(made) in (tuple, list) else made
                        if value in uses:
                            memo[value] = tensor
                        if readers[value]:
                            values[value] = tensor
                    for value in each.reads:
                        readers[value] -= 1
                        if not readers[value]:
                            values.pop(value, None)
            finally:
                set_switches(now, recipe.switches)
        self._stream = stream_of(values[wanted].device)
        return values[wanted]

    def _instructions_left(self, program: Program, wanted: int, values: dict[int, torch.Tensor]) -> list[Instruction]:
        """Those that are still needed. What was made before and is still there is put into ``values``."""
        needed, left = {wanted}, []
        for each in reversed(program.instructions):
            outputs = needed.intersection([value for _, value in each.outputs])
            values.update({value: self._memo[value] for value in outputs if value in self._memo})
            if not outputs.issubset(values):
                left.append(each)
                needed.update(each.reads)
        return left[::-1]

    def _take_sources(
        self, program: Program, cells: Sequence[Any], readers: Counter[int], values: dict[int, torch.Tensor]
    ) -> None:
        held = iter(cells)
        for value, kind, number in program.sources:
            if kind == "input":
                if readers[value]:
                    values[value] = unpack(self._inputs[number], self._unit.name)
                continue
            tensor, version = next(held) if kind == "cell" else self._weights[number]
            if readers[value] and tensor._version != version:
                raise self._in_place(tensor, version)
            values[value] = tensor

    def _in_place(self, tensor: torch.Tensor, expected: int) -> InPlaceError:
        remedy = "Change it after backward: an optimizer step before the last backward of a graph does this."
        what = f"that {self._unit.name} saved, or makes others from"
        return InPlaceError.of(tensor.size(), tensor._version, expected, what, remedy)


@contextmanager
def tapping(
    unit: RecordedUnit, numbers: Iterable[int], take: Callable[[int, int, Sequence[Any]], None]
) -> Iterator[None]:
    """Inside, ``take`` is handed the number and turn of each module, and what it is given; for inverted numbers, what
    it returns.

    Hooks are there for this one call, so that nothing of it is copied or saved along with the modules.
    """
    turns, thread = Counter[int](), threading.get_ident()

    def passed(number: int, _: nn.Module, args: tuple[Any, ...], *output: Any) -> None:
        if threading.get_ident() == thread:
            turns[number] += 1
            take(number, turns[number] - 1, output or args)

    with ExitStack() as stack:
        for number in numbers:
            module = unit.modules[number if number >= 0 else ~number]
            register: Any = module.register_forward_pre_hook if number >= 0 else module.register_forward_hook
            stack.callback(register(functools.partial(passed, number)).remove)
        yield


@contextmanager
def recording(unit: RecordedUnit, recorder: OpRecorder) -> Iterator[None]:
    """Inside, the recorder is handed ops, everywhere or within the modules that the choice names, and what all modules
    are given and return."""
    modes, thread = list[Any](), threading.get_ident()

    def enter(kind: str) -> None:
        if kind == "keep":
            recorder.keeping += 1
        else:
            modes.append(nullcontext() if modes else unit.recording_mode(recorder))
            modes[-1].__enter__()

    def leave(kind: str) -> None:
        if kind == "keep":
            recorder.keeping -= 1
        else:
            modes.pop().__exit__(None, None, None)

    def in_this_thread(step: Callable[[str], None], kind: str) -> Callable[..., None]:
        return lambda *_: step(kind) if threading.get_ident() == thread else None

    numbers = [tap for number in range(1, len(unit.modules)) for tap in (number, ~number)]
    with ExitStack() as stack, tapping(unit, numbers, recorder.pass_module):
        # hooks behind a forward are not called for a KeyboardInterrupt
        stack.callback(lambda: [mode.__exit__(None, None, None) for mode in reversed(modes)])
        for module, kind in unit.named.items():
            stack.callback(module.register_forward_pre_hook(in_this_thread(enter, kind), prepend=True).remove)
            left = module.register_forward_hook(in_this_thread(leave, kind), always_call=True)
            stack.callback(left.remove)
        if unit.everywhere:
            stack.enter_context(unit.recording_mode(recorder))
        yield
