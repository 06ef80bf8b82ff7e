"""Recipes: which tensors of a forward are dropped, and by which ops backward has each again.

The ops come from a record of one forward (``op_recorder``). A recipe holds for later calls of the same signature, which
run without any look at their ops (``recorded_call``): by the number of each tensor that autograd saves, it is kept, or
dropped.

A dropped tensor is made from what the same call has *saved before it*, and from inputs and weights. So a call that
turns out otherwise half-way has lost nothing: from there on it keeps everything. (Rematerialization of single tensors:
Griewank and Walther 2000; MONeT, arXiv:2010.14501.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Any, Literal, NamedTuple

import torch

from autockpt.checkpointing.op_recorder import Geometry, OpRecorder, Read, RecordedOp, Saved, Tap, Tapped, Value

SMALL = 16
"""A tensor this many times smaller than the unit's largest input (statistics of a norm) is not worth recomputing."""
_DEPTH = 64  # of ops between a tensor and what it could be made from; no search goes further back

Form = tuple[torch.Size, tuple[int, ...], torch.dtype]


def form_of(tensor: torch.Tensor) -> Form:
    return tensor.shape, tensor.stride(), tensor.dtype


class Take(NamedTuple):
    """Stands for a tensor among an op's arguments: of the value of this number, as it is or as a view. That has
    its offset from the tensor by which the storage is had."""

    value: int
    view: Geometry | None


def laid_out(tensor: torch.Tensor, view: Geometry | None) -> torch.Tensor:
    if view is None:
        return tensor
    return tensor.as_strided(view[0], view[1], tensor.storage_offset() + view[2])  # type: ignore[operator]


class Instruction:
    """An op of a program. ``outputs``: which of its results is which value; ``reads``: values, once for each use."""

    __slots__ = ("_args", "_func", "_kwargs", "_takes", "outputs", "reads")

    def __init__(self, op: RecordedOp, take: Callable[[Read], Take], numbers: dict[Value, int]) -> None:
        self._func = op.func
        self._args = [_compiled(arg, take) for arg in op.args]
        self._kwargs = {name: _compiled(arg, take) for name, arg in op.kwargs.items()}
        # arguments that are tensors, where none is in a list or named: most ops' are, and then a copy is filled
        takes = [(place, arg.value, arg.view) for place, arg in enumerate(self._args) if type(arg) is Take]
        self._takes = takes if len(takes) == len(op.reads) else None
        self.outputs = [(value.index, numbers[value]) for value in op.outputs]
        self.reads = [numbers[value] for value in op.reads]

    def run(self, values: dict[int, torch.Tensor]) -> Any:
        if self._takes is None:
            kwargs = {name: _filled(arg, values) for name, arg in self._kwargs.items()}
            return self._func(*[_filled(arg, values) for arg in self._args], **kwargs)
        args = self._args.copy()
        for place, value, view in self._takes:
            args[place] = values[value] if view is None else laid_out(values[value], view)
        return self._func(*args, **self._kwargs)


def _compiled(arg: Any, take: Callable[[Read], Take]) -> Any:
    if type(arg) is Read:
        return take(arg)
    return [_compiled(part, take) for part in arg] if type(arg) is list else arg


def _filled(arg: Any, values: dict[int, torch.Tensor]) -> Any:
    if type(arg) is Take:
        return laid_out(values[arg.value], arg.view)
    return [_filled(part, values) for part in arg] if type(arg) is list else arg


class Source(NamedTuple):
    """Where a recipe has a value from: a cell of the call (the number of which it is), an input or a weight."""

    value: int
    kind: Literal["cell", "input", "weight"]
    number: int


class Program:
    """The instructions that make one value, in order, and their sources. ``reads``: how often each value is read."""

    def __init__(self, instructions: list[Instruction], sources: list[Source]) -> None:
        self.instructions, self.sources = instructions, sources
        self.reads = Counter([value for each in instructions for value in each.reads])
        self.cells = tuple([source.number for source in sources if source.kind == "cell"])


class Position(NamedTuple):
    """What becomes of one saved tensor. ``form`` is None where it may have any.

    ``cell``: of kept ones, where later programs find it; of a weight, its number and offset in bytes from that.
    ``number``: its own. A dropped one is a ``view`` of ``value``, which is made from the cells of this ``group``: None
    where it is kept.
    """

    form: Form | None
    cell: int | None = None
    weight: tuple[int, int] | None = None
    number: int = 0
    value: int = 0
    view: Geometry | None = None
    group: int | None = None


class Recipe:
    """What to do with each tensor that a call saves. ``programs`` and ``uses`` (dropped positions) by value.

    ``taps``: by module, which of its tensors go into a cell: (turn, argument, cell, form). ``weights``: the forms of
    those that programs read, by number. ``groups``: cells that dropped tensors are made from.
    """

    def __init__(self) -> None:
        self.positions: list[Position] = []
        self.programs: dict[int, Program] = {}
        self.uses = Counter[int]()
        self.taps: dict[int, list[tuple[int, int, int, Form]]] = {}
        self.inputs: set[int] = set()
        self.weights: dict[int, Form] = {}
        self.cells = 0
        self.groups: list[tuple[int, ...]] = []
        self.content: list[str] = []
        self.is_dynamic = False
        self.switches: tuple[Any, ...] = ()


class Planner:
    """Goes along the record of a call once: its ``recipe``, in which tensors up to ``small`` bytes are kept. ``_reach``
    holds the values that can be had from what is kept so far."""

    def __init__(self, record: OpRecorder, small: int) -> None:
        self.recipe = recipe = Recipe()
        recipe.is_dynamic, recipe.switches = record.is_dynamic, record.switches
        self._small, self._ops = small, [event for event in record.timeline if isinstance(event, RecordedOp)]
        self._compiled: dict[Any, Instruction] = {}
        self._needed = set[int]()  # ops of any program
        self._tapped: list[tuple[Value, Tap]] = []
        self._numbers: dict[Value, int] = {}
        self._reach: set[Value] = set()
        self._kept: dict[Value, tuple[int, Geometry]] = {}  # the cell, and the geometry of the tensor in it
        self._taps: dict[Value, Tap] = {}  # values that a tap has seen by now
        for event in record.timeline:
            if isinstance(event, Saved):
                self._add_position(event)
            elif isinstance(event, Tapped):
                self._taps.setdefault(event.value, event.tap)
            elif all(map(self._is_in_reach, event.reads)):
                self._reach.update(output for output in event.outputs if output.can_be_made)
        used = {cell for cells in recipe.groups for cell in cells}
        recipe.positions = [
            p._replace(cell=p.cell if p.cell in used else None, number=n) for n, p in enumerate(recipe.positions)
        ]
        recipe.content = self._content(record)

    def _is_in_reach(self, value: Value) -> bool:
        return value in self._kept or value in self._reach or (value.given is not None and not value.overwritten)

    def _number(self, value: Value) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def _add_position(self, saved: Saved) -> None:
        value, geometry = saved.value, saved.geometry
        if value is None or geometry is None:
            self.recipe.positions.append(Position(None))
            return
        form = geometry[0], geometry[1], saved.dtype
        # what the unit overwrites is kept: backward then meets the change as it does in plain training
        can_drop = not (value.given or value.overwritten or value in self._kept) and value.nbytes > self._small
        if can_drop and self._bring_in_reach(value):
            self._drop(value, geometry, form)
            return
        cell = weight = None
        if not (value.overwritten or value.given or value in self._kept):
            cell = len(self._kept)
            self._kept[value] = cell, geometry
        if value.given == "weight" and not value.overwritten:
            offset = (geometry[2] - value.geometry[2]) * saved.dtype.itemsize
            weight = value.number, offset
        self.recipe.positions.append(Position(form, cell, weight))

    def _drop(self, value: Value, geometry: Geometry, form: Form) -> None:
        recipe, number = self.recipe, self._number(value)
        if number not in recipe.programs:
            recipe.programs[number] = self._program(value)
        recipe.uses[number] += 1
        cells = recipe.programs[number].cells
        view = _relative(geometry, value.geometry)
        if cells not in recipe.groups:
            recipe.groups.append(cells)
        recipe.positions.append(Position(form, value=number, view=view, group=recipe.groups.index(cells)))
        recipe.cells = max([recipe.cells, *(cell + 1 for cell in cells)])

    # What to hold for a value. The cost of a value is the extra bytes to hold so that it can be recomputed: 0 if it is
    # in reach, else the sum, over what its op reads, of the lesser of recomputing that and holding it by a tap.
    # `_by_making` and `_by_any_way` find the least cost, to a depth of `_DEPTH` ops. `_commit` walks the same decisions
    # again and notes the taps.

    def _bring_in_reach(self, value: Value) -> bool:
        """Tap what a value can be made from, where that is less than the value itself."""
        memo: dict[Value, float] = {}
        if self._by_making(value, memo, _DEPTH) >= value.nbytes:
            return False
        self._commit(value, memo)
        return True

    def _by_making(self, value: Value, memo: dict[Value, float], depth: int) -> float:
        """Bytes that must be held besides for ops to make this; infinite where none can."""
        if self._is_in_reach(value):
            return 0
        if value.op is None or not value.can_be_made or depth == 0:
            return inf
        return sum(self._by_any_way(read, memo, depth - 1) for read in set(value.op.reads))

    def _by_any_way(self, value: Value, memo: dict[Value, float], depth: int) -> float:
        """The same, or the bytes of the value itself where a tap has it and that is less."""
        if value not in memo:
            making = self._by_making(value, memo, depth)
            can_hold = making and value in self._taps and not value.overwritten
            memo[value] = min(making, value.nbytes if can_hold else inf)
        return memo[value]

    def _commit(self, value: Value, memo: dict[Value, float]) -> None:
        """Hold what the making of this rests on."""
        if self._is_in_reach(value):
            return
        assert value.op is not None, "it costs less than the infinite"
        for read in value.op.reads:
            if self._is_in_reach(read):
                continue
            tap = None if read.overwritten else self._taps.get(read)
            if tap is not None and read.nbytes <= self._by_making(read, memo, _DEPTH):
                cell = len(self._kept)
                self._kept[read] = cell, read.geometry
                self._tapped.append((read, tap))
                form = read.geometry[0], read.geometry[1], read.dtype
                self.recipe.taps.setdefault(tap.module, []).append((tap.turn, tap.argument, cell, form))
            else:
                self._commit(read, memo)
        self._reach.add(value)

    def _program(self, wanted: Value) -> Program:
        """The ops that lead to a value. Cells that later positions fill are not there yet."""
        needed, sources, open_ends = set[int](), dict[Value, Source](), [wanted]
        while open_ends:
            value = open_ends.pop()
            if value in sources:
                continue
            if value in self._kept:
                sources[value] = Source(self._number(value), "cell", self._kept[value][0])
            elif value.given is not None and not value.overwritten:
                sources[value] = Source(self._number(value), value.given, value.number)
                if value.given == "input":
                    self.recipe.inputs.add(value.number)
                else:
                    self.recipe.weights[value.number] = *value.geometry[:2], value.dtype
            elif id(value.op) not in needed:
                assert value.op is not None, "it is in reach"
                needed.add(id(value.op))
                open_ends += value.op.reads
                for output in value.op.outputs:
                    self._number(output)

        self._needed |= needed

        def take(read: Read) -> Take:
            base = self._kept[read.value][1] if read.value in self._kept else read.value.geometry
            return Take(self._number(read.value), _relative(read.geometry, base))

        def compiled(op: RecordedOp) -> Instruction:
            # programs share it where they find the same of what it reads in cells
            key = op, *[read in self._kept for read in op.reads]
            if key not in self._compiled:
                self._compiled[key] = Instruction(op, take, self._numbers)
            return self._compiled[key]

        return Program([compiled(op) for op in self._ops if id(op) in needed], list(sources.values()))

    def _content(self, record: OpRecorder) -> list[str]:
        """What the call did, in lines: equal for calls that save the same, and make what they drop by the same ops from
        the same. Every number and flag among the ops' arguments is in it, to the last bit.

        Casts of weights and tensors from elsewhere are alike: which of the two it is depends on what autocast
        remembers.
        """
        names: dict[Value, str] = {}

        def name(value: Value | None) -> str:
            if value is None or value.foreign or (value.op is not None and value.op.casts_a_weight):
                return "elsewhere"
            return f"{value.given} {value.number}" if value.given else names.setdefault(value, f"value {len(names)}")

        lines = []
        for op in self._ops:
            if id(op) in self._needed and not op.casts_a_weight:
                args = [_text(arg, name) for arg in op.args] + [f"{k}={_text(v, name)}" for k, v in op.kwargs.items()]
                lines.append(f"{op.func}({', '.join(args)}) -> {', '.join(map(name, op.outputs))}")
        lines += [f"{name(value)} in {tap}" for value, tap in self._tapped]
        saved = [event for event in record.timeline if isinstance(event, Saved)]
        return [*lines, *(f"saved {name(each.value)} {each.geometry}" for each in saved)]


def _relative(geometry: Geometry, base: Geometry) -> Geometry | None:
    return None if geometry == base else (geometry[0], geometry[1], geometry[2] - base[2])


def _text(arg: Any, name: Callable[[Value], str]) -> str:
    if type(arg) is Read:
        return f"{name(arg.value)} {arg.geometry}"
    return f"[{', '.join(_text(part, name) for part in arg)}]" if type(arg) is list else repr(arg)
