"""Compare what backward is given with what forward computed: a recomputation that differs must not train.

A unit's calls are checked at first and then ever more seldom (``Schedule``). In a checked call every tensor that
is dropped or moved is fingerprinted when the unit's forward has ended, again just before backward recomputes it if the
original is still alive, and compared with what backward is given. The verdicts are read once, at the end of that
backward. Other calls are not looked at, and cost nothing.

Comparisons run on the tensors' device and draw no random numbers. They hold 64 bits of a tensor.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from autockpt.checkpointing.fingerprint import (
    Compared,
    distance_of,
    fingerprint,
    laid_out_on,
    layout_of,
    left_unwritten,
    local_part,
    probe_of,
    quietly,
    read_verdicts,
    repeats,
    sketch_of,
    stream_of,
    tolerance_of,
    why_not,
)
from autockpt.errors import RerunMismatch, UsageError

VARIABLE = "AUTOCKPT_SENTINELS"
Mode = Literal["off", "sample", "all"]
MODES: tuple[Mode, ...] = ("off", "sample", "all")
FIRST_CALLS, LONGEST = 2, 511
"""Checked are the first calls of each kind, and later ones at growing distances, at last after so many others: what
begins late is found within 512 calls."""
_OTHER_STREAM = "a tensor that was saved on another stream"
_current_node: Callable[[], Any] = torch._C._current_autograd_node
_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_pending = weakref.WeakValueDictionary[tuple["DivergenceCheck", int], "OrderedDict[CheckedCall, None]"]()
"""Calls to judge when a backward ends, which alone holds them: one that fails lets go of them."""


class Schedule:
    """Which calls of one kind are checked: the first ones, one after a ``gap`` of others, and so on, each time twice as
    long."""

    def __init__(self, first: int = FIRST_CALLS, gap: int = 1) -> None:
        self.calls = self._last = FIRST_CALLS - first
        self._gap, self._due = gap, 0

    def next(self) -> int | None:
        """A call begins. Where it is to be checked, how many calls went unchecked since the last that was."""
        self.calls += 1
        if self.calls > FIRST_CALLS and self.calls < self._due:
            return None
        unchecked, self._last = self.calls - self._last - 1, self.calls
        if self.calls >= FIRST_CALLS:
            self._due, self._gap = self.calls + self._gap + 1, min(2 * self._gap, LONGEST)
        return unchecked


@dataclass
class UnitProof:
    """What has been checked of one unit.

    ``checks``: calls whose backward was given what forward had computed; ``tensors``: those compared in these;
    ``unchecked``: what could not be compared, by the reason, and how often.
    """

    checks: int = 0
    tensors: int = 0
    unchecked: Counter[str] = field(default_factory=Counter)


class DivergenceCheck:
    """The checks (sentinels) of one session, and what they have found so far; ``print`` shows it. Copied and pickled
    with the session.

    ``passes`` counts forward passes of the whole model with gradients enabled; with gradient accumulation an optimizer
    step has several. Every unit's first two calls are checked, with ``sample`` then ever fewer, at last one of 512, and
    with ``all`` every call.

    ``in_mid_training``, to be set before the first forward: steps are measured as they are in the middle of training.
    One call of each kind is checked for what it changes, and nothing is compared.
    """

    def __init__(self, mode: Mode = "off") -> None:
        self.mode: Mode = mode
        self.passes = 0
        self.in_mid_training = False
        self.units: dict[str, UnitProof] = {}
        self._warned = False
        self.open: list[weakref.ref[CheckedCall]] = []  # of the present forward

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "open": []}

    @property
    def checks(self) -> int:
        """Calls proven right, of all units."""
        return sum(unit.checks for unit in self.units.values())

    @property
    def tensors(self) -> int:
        """Tensors compared, of all units."""
        return sum(unit.tensors for unit in self.units.values())

    def __str__(self) -> str:
        if self.mode == "off":
            return f"sentinels are off ({VARIABLE}, sentinels= of apply)"
        proven = sum(1 for unit in self.units.values() if unit.checks)
        some = f"{FIRST_CALLS} first calls, then ever fewer, at least one in {LONGEST + 1}"
        often = "every call" if self.mode == "all" else some
        lines = [
            f"sentinels ({often}): in {self.passes} forward passes {self.tensors} tensors in {self.checks} calls of "
            f"{proven} of {len(self.units)} units were what forward had computed"
        ]
        for name, unit in self.units.items():
            lines += [f"  {name}: {times} × not checked: {why}" for why, times in unit.unchecked.items()]
            if not unit.checks:
                lines.append(f"  {name}: not checked yet (no backward went through it, or it is compiled)")
        return "\n".join(lines)

    __repr__ = __str__

    def unit(self, name: str) -> UnitCheck:
        """The check of one more attachment."""
        return UnitCheck(self, name, self.units.setdefault(name, UnitProof()) if self.mode != "off" else UnitProof())

    def begin(self) -> None:
        """A forward of the whole model begins."""
        if not torch.compiler.is_dynamo_compiling():
            self.passes += 1

    def end(self) -> None:
        """A forward of the whole model has ended. What a unit returned is alive until here, and may be written to."""
        if not torch.compiler.is_dynamo_compiling():
            opened, self.open = self.open, []
            for call in filter(None, (ref() for ref in opened)):
                call.look_again()

    def judge_at_end(self, call: CheckedCall) -> None:
        """Judge a call when the present backward ends, or now outside of any."""
        if (task := _graph_task()) == -1:
            self._judge([call])
            return
        calls = _pending.get((self, task))
        if calls is None:  # two threads may find that: each of their callbacks judges its own
            calls = _pending[self, task] = OrderedDict()
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, task, calls))
        calls[call] = None

    def _finish(self, task: int, calls: OrderedDict[CheckedCall, None]) -> None:
        _pending.pop((self, task), None)
        self._judge(list(calls))

    def _judge(self, calls: list[CheckedCall]) -> None:
        """The one read. Raises RerunMismatch for the first unit with tensors that differ."""
        compared = [(call, pair) for call in calls for pair in call.compared]
        wrong: dict[CheckedCall, list[Compared]] = {}
        for (call, pair), (same, away) in zip(compared, read_verdicts([pair for _, pair in compared]), strict=True):
            if same:
                continue
            if pair.tolerance is not None and away <= pair.tolerance:
                self._does_not_repeat(call.unit, away)
            else:
                wrong.setdefault(call, []).append(pair)
        for call in calls:
            call.compared = []
            if call not in wrong:
                proof = call.unit.proof
                proof.checks += 1
                proof.tensors += sum(1 for owner, _ in compared if owner is call)
                call.unit.last_checked = call.forward_pass
        for call, different in wrong.items():
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise call.mismatch(different[0].what + more)

    def _does_not_repeat(self, unit: UnitCheck, away: float) -> None:
        """A device's kernels are not bitwise deterministic: warn once."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"kernels of {unit.name} are not bitwise deterministic on this device (distance {away:.1e}), so what "
                "is recomputed is compared within rounding only. torch.use_deterministic_algorithms(True) allows a "
                "bitwise comparison",
                stacklevel=2,
            )


def sentinels_of(mode: str | None) -> DivergenceCheck:
    """The check of one session: of ``mode``, else of ``AUTOCKPT_SENTINELS``, else ``sample``. Raises UsageError."""
    source = "sentinels" if mode is not None else VARIABLE
    asked = mode if mode is not None else os.environ.get(VARIABLE, "").strip() or "sample"
    if asked in MODES:
        return DivergenceCheck(asked)
    raise UsageError(f"{source} is {asked!r}", remedy=f"Set {source} to {', '.join(MODES[:-1])} or {MODES[-1]}.")


class UnitCheck:
    """The check of one attachment to a unit."""

    def __init__(self, sentinels: DivergenceCheck, name: str, proof: UnitProof) -> None:
        self.sentinels, self.name, self.proof = sentinels, name, proof
        self.calls = 0
        self.last_checked: int | None = None  # the forward pass
        self._schedule = Schedule()

    def observer(self, *, checked: bool | None = None, new: bool = False) -> CheckedCall | None:
        """A call begins: what looks at the tensors that it saves; None where nothing does. ``checked`` None: by a
        schedule of its own, or where it does something ``new``."""
        if self.sentinels.in_mid_training or self.sentinels.mode == "off":
            return None
        self.calls += 1
        if checked is None:
            checked = self._schedule.next() is not None or new
        if not checked and self.sentinels.mode != "all":
            return None
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self.proof.unchecked["calls in a CUDA graph that is being captured"] += 1
            return None
        call = CheckedCall(self)
        # where units are called without the model around them, no forward of it ends
        self.sentinels.open = [ref for ref in (*self.sentinels.open, weakref.ref(call)) if ref() is not None]
        return call


class CheckedCall:
    """One call that is checked: an observer of all that it saves in this ``forward_pass``."""

    def __init__(self, unit: UnitCheck) -> None:
        self.unit, self.sentinels = unit, unit.sentinels
        self.forward_pass = unit.sentinels.passes or unit.calls
        self._entries: list[weakref.ref[CheckedTensor]] = []  # what autograd holds owns them
        self.compared: list[Compared] = []  # to be judged when a backward ends
        self._parameters: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # with their fingerprints

    def look_at(self, number: int, tensor: torch.Tensor) -> CheckedTensor:
        """Autograd saves ``tensor``, the one of this number."""
        entry = CheckedTensor(self, number, tensor)
        self._entries.append(weakref.ref(entry))
        return entry

    def forward_ended(self) -> None:
        """The unit's forward has ended."""
        for entry in self._alive():
            entry.let_go()

    def look_again(self) -> None:
        """What the originals hold now, as far as they live, is what backward would read."""
        for entry in self._alive():
            entry.look_again()

    def _alive(self) -> list[CheckedTensor]:
        return [entry for ref in self._entries if (entry := ref()) is not None]

    def mismatch(self, what: str) -> RerunMismatch:
        """The error for ``what`` was not as forward had computed it."""
        name, last = self.unit.name, self.unit.last_checked or 0
        since = f"last proven right in pass {last}" if last else "never proven right"
        back = f"Go back to a checkpoint from before forward pass {last + 1}" if last else "Start again"
        return RerunMismatch(
            f"backward of {name} was not given what its forward had computed (forward pass {self.forward_pass} since "
            f"the plan was applied, {since}): {what}. Do not use the gradients of this backward",
            remedy=f"Use `save` for {name}, or take out of its forward what changes by itself or before backward: an "
            f"object, attribute or generator that it reads, a clock, writes by `.data` or NumPy. {back}.",
        )

    def before_rerun(self, module: torch.nn.Module) -> None:
        """The unit is about to be recomputed."""
        named = [(name, p) for name, p in module.named_parameters() if why_not(local_part(p)) is None]
        self._parameters = [(name, p, fingerprint(local_part(p))) for name, p in named]

    def after_rerun(self) -> None:
        """It has been: a forward that writes to a parameter by ``.data`` has done so twice."""
        for name, parameter, before in self._parameters:
            tensor = local_part(parameter)
            what, stream = f"{name}, which running it again changed", stream_of(tensor.device)
            self.compared.append(Compared(what, before, fingerprint(tensor), stream))
        self._parameters = []
        self.sentinels.judge_at_end(self)


class CheckedTensor:
    """A saved tensor of a checked call. It is held until the forward has ended: a kernel, or the unit's own code, may
    write to it without a new version, and backward would read what was written."""

    def __init__(self, call: CheckedCall, number: int, tensor: torch.Tensor) -> None:
        self._call, self._number = call, number
        self._print: torch.Tensor | None = None
        self._sketch: torch.Tensor | None = None
        self._held: torch.Tensor | None = None
        tensor = local_part(tensor)
        if (why := why_not(tensor)) is not None:
            call.unit.proof.unchecked[why] += 1
            return
        with quietly():
            self._held = tensor.detach()
            self._probe, self._version = probe_of(tensor), tensor._version
        self._layout, self._device = layout_of(tensor), tensor.device
        self._storage, self._stream = weakref.ref(tensor.untyped_storage()), stream_of(tensor.device)

    def let_go(self) -> None:
        """Fingerprint what is held, and hold it no longer."""
        tensor, self._held = self._held, None
        if tensor is None or tensor._version != self._version:
            return  # which autograd's own check is for
        why = _OTHER_STREAM if stream_of(tensor.device) != self._stream else why_not(tensor)
        if why is not None:
            self._call.unit.proof.unchecked[why] += 1
        else:
            self._take_print(tensor)

    def _take_print(self, tensor: torch.Tensor) -> None:
        self._print = fingerprint(tensor)
        if tensor.is_floating_point() and not repeats(tensor.device):
            self._sketch = sketch_of(tensor)

    def look_again(self) -> None:
        """The original is about to be recomputed or fetched: note what it holds now, if it is alive. Backward would
        have read what was written to its memory in between."""
        storage = self._storage() if self._print is not None else None
        if storage is None or not storage.nbytes() or self._probe._version != self._version:
            return
        if stream_of(self._device) != self._stream:
            return
        with quietly():
            self._take_print(laid_out_on(storage, self._device, self._layout))

    def handed(self, value: torch.Tensor) -> None:
        """Backward is given ``value`` for it. Compared later, with all others at once. Raises RerunMismatch where its
        type or shape is another."""
        if self._print is None:
            return
        value, node = local_part(value), _current_node()
        if stream_of(value.device) != self._stream:
            why = _OTHER_STREAM
        elif node is not None and left_unwritten(node, value):
            why = "a tensor that its kernel need not write"
        else:
            why = why_not(value)
        if why is not None:
            self._call.unit.proof.unchecked[why] += 1
            return
        dtype, size, *_ = self._layout
        kind, reader = str(dtype).removeprefix("torch."), "is read" if node is None else f"{node.name()} reads"
        what = f"the {kind} tensor {tuple(size)} that {reader} (number {self._number + 1} of those that forward saved)"
        if (value.dtype, value.size()) != (dtype, size):
            raise self._call.mismatch(what)
        distance = tolerance = None
        if self._sketch is not None:
            distance, tolerance = distance_of(self._sketch, sketch_of(value)), tolerance_of(value.dtype)
        compared = Compared(what, self._print, fingerprint(value), self._stream, distance, tolerance)
        self._call.compared.append(compared)
        self._call.sentinels.judge_at_end(self._call)
