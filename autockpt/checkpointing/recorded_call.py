"""One call of a unit whose saved tensors are made again: by a recipe of earlier calls, or recorded, or both.

Recorded calls hold what they save until they end, and then drop it by the recipe that they gave: they are right
whatever they do. A call that goes by a recipe has hooks on saved tensors alone, and keeps everything from the first one
on whose form is another.

Who holds whom: a node of the graph holds what ``pack`` returned for it, and the call by its ``unpack``. What dropped
tensors are made from stands in what ``pack`` returned, not in the call: it dies with the nodes that need it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from autockpt.checkpointing.arguments import Held, hold, unpack
from autockpt.checkpointing.divergence import CheckedCall, UnitCheck
from autockpt.checkpointing.fingerprint import stream_of
from autockpt.checkpointing.op_recorder import OpRecorder
from autockpt.checkpointing.recipes import SMALL, Position, Program, Recipe, Step, form_of, laid_out, plan
from autockpt.checkpointing.recorded_unit import RecordedUnit
from autockpt.checkpointing.replay_context import (
    one_at_a_time,
    put_switches,
    running_again,
    switches,
)
from autockpt.errors import InPlaceError

_C: Any = torch._C
_BEYOND = Position((torch.Size((-1,)), (), torch.bool))  # no tensor is like it


class RecordedCall:
    """One call of ``unit`` with these arguments. ``is_recorded``, and ``is_first`` of its signature."""

    __slots__ = (
        *("_cells", "_compares", "_inputs", "_known", "_left", "_lost", "_memo", "_number", "_observer"),
        *("_recipe", "_sources", "_stream", "_tensors", "_unit", "_weights", "is_first", "is_recorded"),
    )

    def __init__(self, unit: RecordedUnit, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._unit = unit
        self._known, self._tensors, self.is_recorded = known, _, _ = unit.next_call(args, kwargs)
        self.is_first = known.recipe is None
        self._number, self._lost = 0, False
        self._compares: Container[int] = ()  # which dropped tensors the observer looks at
        self._memo: dict[int, torch.Tensor] = {}  # values that were made, until every position has them
        self._left: Counter[int] | None = None
        self._stream: Any = None  # that they were made on
        if not self.is_recorded:
            assert known.recipe is not None
            self._go_by(known.recipe, [home.get(name) for home, name in unit.weights])

    def _go_by(self, recipe: Recipe, weights: Sequence[torch.Tensor | None]) -> None:
        """Take what the recipe starts from."""
        self._recipe = recipe
        self._cells: list[Any] = [None] * recipe.cells
        self._sources: dict[tuple[int, ...], tuple[Any, ...]] = {}  # what is in these cells
        inputs = hold([self._tensors[number] for number in recipe.inputs])
        self._inputs: dict[int, Held] = dict(zip(recipe.inputs, inputs, strict=True))
        self._weights: dict[int, tuple[torch.Tensor, int]] = {}
        for number, strides in recipe.weights.items():
            weight = weights[number]
            if weight is None or weight.stride() != strides:
                self._lost = True
                break
            self._weights[number] = weight.detach(), weight._version  # other memory may be assigned to its `.data`

    # In forward.

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        observer: CheckedCall | UnitCheck | None = None,
    ) -> Any:
        """The forward. ``observer`` compares what is dropped; in unchecked calls, few tensors that all others lead to.

        Raises RerunMismatch where the call shows that earlier ones were not given what they had computed.
        """
        unit, self._observer = self._unit, observer
        if self.is_recorded:
            return self._record(forward, args, kwargs)
        recipe = self._recipe
        self._compares = _compared(recipe, observer)
        with saved_tensors_hooks(self.pack, self.unpack):
            if recipe.taps:
                turns, thread = Counter[int](), threading.get_ident()
                with tapping(unit, recipe.taps, functools.partial(self._take, turns, thread)):
                    output = forward(*args, **kwargs)
            else:
                output = forward(*args, **kwargs)
        self._known.followed += 1
        if self._lost or self._number != len(recipe.positions):
            unit.lose(self._known)
        self._tensors, self._cells, self._sources = [], [], {}
        return output

    def pack(self, tensor: torch.Tensor) -> Any:
        """The hook for what autograd saves.

        Of a kept tensor the tensor and its version; of a dropped one its number, what compares it, and cells: what of
        this call is kept, and it is made from. Kept is not its graph, which it would keep alive by way of Python; but
        leaves themselves, as autograd holds them, with what was set on them.
        """
        number = self._number
        self._number = number + 1
        # No function is called that need not be: a layer saves dozens of tensors.
        cell = None
        if not self._lost:
            positions = self._recipe.positions
            form, cell, weight, dropped, _, _, cells = positions[number] if number < len(positions) else _BEYOND
            if form is not None and (
                tensor.shape != form[0] or tensor.stride() != form[1] or tensor.dtype is not form[2]
            ):
                self._lost, cell = True, None
            elif dropped is not None:
                if (sources := self._sources.get(cells)) is None:
                    sources = self._sources[cells] = tuple(map(self._cells.__getitem__, cells))
                if None not in sources:
                    looks = dropped in self._compares
                    return number, self._observer.sample(dropped, tensor) if looks else None, sources  # type: ignore[union-attr]
                self._lost = True  # a module inside was not called, or with another tensor
            elif weight is not None:
                # FullyShardedDataParallel has all weights in one storage
                home, name = self._unit.weights[weight[0]]
                there = home.get(name)
                self._lost = there is None or tensor.data_ptr() - there.data_ptr() != weight[1]
        kept = tensor if tensor.is_leaf else tensor.detach(), tensor._version
        if cell is not None:
            self._cells[cell] = kept
        return kept

    def _take(self, turns: Counter[int], thread: int, number: int, tensors: Sequence[Any]) -> None:
        """A module inside is given, or returns, these tensors."""
        if threading.get_ident() != thread:
            return
        turn = turns[number]
        turns[number] += 1
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
        recipe = plan(recorder, small)
        self._go_by(recipe, weights)
        self._drop(recipe, slots, recorder)
        recorder.forget()
        unit.learn(self._known, recipe)
        unit.leave_out_changed(numbers)
        self._tensors, self._cells, self._sources = [], [], {}
        return output

    def hold(self, recorder: OpRecorder, slots: list[list[Any]], tensor: torch.Tensor) -> Any:
        """The hook for what autograd saves in a recorded call."""
        recorder.save(tensor)
        slots.append([tensor if tensor.is_leaf else tensor.detach(), tensor._version, stream_of(tensor.device)])
        return slots[-1]

    def _drop(self, recipe: Recipe, slots: list[list[Any]], recorder: OpRecorder) -> None:
        compares, observer = _compared(recipe, self._observer), self._observer
        for tap, cell in recipe.cells_of_taps():
            self._cells[cell] = recorder.tapped[tap]
        for number, (slot, position) in enumerate(zip(slots, recipe.positions, strict=True)):
            if position.cell is not None:
                self._cells[position.cell] = slot[:2]
            elif position.dropped is not None:
                # what was made on another stream may be freed there before this one has read it
                looks = position.dropped in compares and stream_of(slot[0].device) == slot[2]
                comparison = observer.sample(position.dropped, slot[0]) if looks else None  # type: ignore[union-attr]
                slot[:] = number, comparison, tuple([self._cells[cell] for cell in position.cells])

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
        if self._stream is not None:
            self._wait_for_other_stream()
        base = self._memo.get(position.value)
        if base is None:
            base = self._make(position.value, packed[2])
        self._count_down(recipe, position.value)
        tensor = base if position.view is None else laid_out(base, position.view)
        if comparison is not None:
            comparison.handed(tensor)
        return tensor

    def _wait_for_other_stream(self) -> None:
        """A node may run on another stream than the one on which values were made for it."""
        device = next((tensor.device for tensor in self._memo.values()), None)
        if device is None or device.type == "cpu" or (now := stream_of(device)) == self._stream:
            return
        now.wait_event(self._stream.record_event())
        for tensor in self._memo.values():
            tensor.record_stream(now)
        self._stream = now

    def _count_down(self, recipe: Recipe, value: int) -> None:
        """One more position has the value. After the last one a further backward may begin."""
        if self._left is None:
            self._left = Counter(recipe.uses)
        self._left[value] -= 1
        if not self._left[value]:
            self._memo.pop(value, None)
            self._left[value] = recipe.uses[value]

    def _make(self, wanted: int, cells: Sequence[Any]) -> torch.Tensor:
        """Run the ops that lead to a value, and keep what they make for other positions.

        Below autograd and autocast: ops do just what their call says. Gradients count as enabled, as whenever a unit
        runs again.
        """
        recipe = self._recipe
        program, values = recipe.programs[wanted], dict[int, torch.Tensor]()
        steps = self._steps_left(program, wanted, values) if self._memo else program.steps
        whole = len(steps) == len(program.steps)
        readers = program.reads.copy() if whole else Counter([value for step in steps for value in step.reads])
        self._take_sources(program, cells, readers, values)
        readers[wanted] += 1  # who is given it
        uses, memo = recipe.uses, self._memo
        below, uncast, plain = _C._AutoDispatchBelowAutograd(), _C._DisableAutocast(), _C.DisableTorchFunction()
        with below, uncast, plain, running_again(self._unit.name), torch.enable_grad(), self._as_in_forward(recipe):
            for step in steps:
                made = step.run(values)
                for index, value in step.outputs:
                    tensor = made[index] if type(made) in (tuple, list) else made
                    if value in uses:
                        memo[value] = tensor
                    if readers[value]:
                        values[value] = tensor
                for value in step.reads:
                    readers[value] -= 1
                    if not readers[value]:
                        values.pop(value, None)
        self._stream = stream_of(values[wanted].device)
        return values[wanted]

    def _steps_left(self, program: Program, wanted: int, values: dict[int, torch.Tensor]) -> list[Step]:
        """The steps that are needed; what was made before and is there still is put into ``values``."""
        needed, steps = {wanted}, []
        for step in reversed(program.steps):
            outputs = needed.intersection([value for _, value in step.outputs])
            values.update({value: self._memo[value] for value in outputs if value in self._memo})
            if not outputs.issubset(values):
                steps.append(step)
                needed.update(step.reads)
        return steps[::-1]

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
        what = f"{tuple(tensor.shape)} that {self._unit.name} saved, or makes others from"
        return InPlaceError.of(what, tensor._version, expected, remedy)

    @contextmanager
    def _as_in_forward(self, recipe: Recipe) -> Iterator[None]:
        """With the kernels that the forward had."""
        if (now := switches()) == recipe.switches:
            yield
            return
        with one_at_a_time(self._unit.name):  # they belong to the process
            put_switches(recipe.switches, now)
            try:
                yield
            finally:
                put_switches(now, recipe.switches)


def _compared(recipe: Recipe, observer: CheckedCall | UnitCheck | None) -> Container[int]:
    if observer is None:
        return ()
    return recipe.ends if type(observer) is UnitCheck else range(sys.maxsize)


@contextmanager
def tapping(unit: RecordedUnit, numbers: Iterable[int], take: Callable[[int, Sequence[Any]], None]) -> Iterator[None]:
    """Inside, ``take`` is handed what modules are given; for inverted numbers, what they return.

    Hooks are there for this one call, so that nothing of it is copied or saved along with the modules.
    """

    def before(number: int, _: nn.Module, args: tuple[Any, ...]) -> None:
        take(number, args)

    def after(number: int, _: nn.Module, args: Any, output: Any) -> None:
        take(number, (output,))

    with ExitStack() as stack:
        for number in numbers:
            if number >= 0:
                handle = unit.modules[number].register_forward_pre_hook(functools.partial(before, number))
            else:
                handle = unit.modules[~number].register_forward_hook(functools.partial(after, number))
            stack.callback(handle.remove)
        yield


@contextmanager
def recording(unit: RecordedUnit, recorder: OpRecorder) -> Iterator[None]:
    """Inside, the recorder is handed ops, everywhere or within the modules that the choice names, and told what all
    modules are given and return."""
    thread, modes = threading.get_ident(), list[Any]()

    def take(number: int, tensors: Sequence[Any]) -> None:
        if threading.get_ident() == thread:
            recorder.pass_module(number, tensors)

    def enter(kind: str, *_: Any) -> None:
        if kind == "keep":
            recorder.keeping += 1
        else:
            modes.append(nullcontext() if modes else unit.watching(recorder))
            modes[-1].__enter__()

    def leave(kind: str, *_: Any) -> None:
        if kind == "keep":
            recorder.keeping -= 1
        else:
            modes.pop().__exit__(None, None, None)

    numbers = [tap for number in range(1, len(unit.modules)) for tap in (number, ~number)]
    with ExitStack() as stack, tapping(unit, numbers, take):
        for module, kind in unit.scopes.items():
            stack.callback(module.register_forward_pre_hook(functools.partial(enter, kind), prepend=True).remove)
            left = module.register_forward_hook(functools.partial(leave, kind), always_call=True)
            stack.callback(left.remove)
        if unit.everywhere:
            stack.enter_context(unit.watching(recorder))
        yield
