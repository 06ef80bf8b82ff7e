"""Sentinels: what forward drops is fingerprinted, and what backward is given in its place is compared with it.

A unit's first calls are checked, afterwards one call in ``WINDOW`` of each, one unit after the other; of all calls
between, a few tensors at one place (``spots``): units that begin to do otherwise late are found, too. Of units whose
code may write to tensors unseen every call is checked, and of all units where code around them may, as that may write
to what a unit returned. Fingerprints are taken when the unit's forward has ended, anew when the whole model's has, and
once more just before backward makes or fetches a tensor, as long as the original lives: so they are of what backward
would have read without the choice, changes by ``.data`` or NumPy included. What runs again must also leave the unit's
parameters and buffers as they were.

All is compared on the device, and read once at the end of a backward in which something was checked; none of it sees
the user's code, changes a random state, or holds on to more than 64 bits of a tensor, or a few of its elements.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from autockpt.errors import RerunMismatch
from autockpt.policies.compiling import eagerly
from autockpt.policies.conflicts import current_node, sequence_nr
from autockpt.policies.fingerprints import (
    Compared,
    Form,
    Place,
    fingerprint,
    form_of,
    laid_out_on,
    layout_of,
    left_unwritten,
    local_part,
    memory_of,
    quietly,
    read,
    stream_of,
    why_not,
)
from autockpt.policies.rerun_state.code import Code
from autockpt.policies.rerun_state.reach import code_of
from autockpt.policies.saved import probe_of
from autockpt.policies.sketches import distance_of, repeats, tolerance_of, unseen_sums
from autockpt.policies.slots import Packing
from autockpt.policies.spots import DeviceSpots, Places, SpotCheck, can_be_spotted, is_computed, tensor_read

Mode = Literal["off", "sample", "all"]
WINDOW = 499
"""Steps after which every unit has been checked again, at most. A prime: of a unit that is called several times in
every step all calls have their turn."""
FIRST_CALLS = 2
HELD_BYTES = 16 << 20
"""How much of what forward saves is held until the unit's forward has ended, where backward never holds all of it and
the unit's code may write to it unseen."""

_CAUSES = (
    "Likely causes: an object, counter, generator, attribute, hook or context that forward reads was changed, by it or "
    "before backward; forward draws from a generator that it seeds anew (`default_rng()`, `seed()`), or reads a clock; "
    "a tensor was written to by `.data` or NumPy; a function of torch.jit.script was compiled anew; memory or hardware "
    "failed."
)

_OF_THE_PROCESS = ("_lock", "open", "spots", "_pending", "_in_a_thread")
_ELSEWHERE = "a tensor that was saved on another stream"
_code_of = eagerly(code_of)


class Sentinels:
    """All sentinels of one session, and its steps: forward passes of the whole model. Copied and pickled with it."""

    def __init__(self, mode: Mode = "off") -> None:
        self.mode: Mode = mode
        self.step = 0
        self.repeats, self.measured = True, False
        self.written_to_by_others = False  # code of the model may write unseen to any tensor
        self.units: list[UnitSentinel] = []
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self.open: list[weakref.ref[CheckedCall]] = []
        self.spots = DeviceSpots()
        self._pending: dict[int, dict[int, CheckedCall]] = {}
        self._in_a_thread: RerunMismatch | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in _OF_THE_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def unit(self, name: str) -> UnitSentinel | None:
        """The sentinel of one more attachment; None where all are off."""
        if self.mode == "off":
            return None
        self.units.append(UnitSentinel(self, name))
        return self.units[-1]

    def in_mid_training(self) -> None:
        """Go on as if every unit's first calls were over, and no way through it new: for steps that are measured."""
        self.measured = True
        for index, unit in enumerate(self.units):
            unit.past_first(index)

    def begin(self) -> None:
        """A forward of the whole model begins.

        Raises RerunMismatch where one ended a backward in a thread of the user's own, whose errors stay there.
        """
        if torch.compiler.is_dynamo_compiling():
            return
        error, self._in_a_thread = self._in_a_thread, None
        if error is not None:
            raise error
        self.step += 1
        if torch._C._current_graph_task_id() == -1:
            self._pending.clear()  # left by a backward that failed
        if self.spots and not _capturing() and (spotted := self.spots.next_step()) is not None:
            raise spotted.error()

    def end(self) -> None:
        """A forward of the whole model has ended."""
        if torch.compiler.is_dynamo_compiling():
            return
        opened, self.open = self.open, []
        for ref in opened:
            if (watch := ref()) is not None:
                watch.look_again()

    def judge_at_end(self, watch: CheckedCall) -> None:
        """Judge a watch when the present backward ends, or now outside of any."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            self._judge([watch])
            return
        with self._lock:
            if task not in self._pending:
                self._pending[task] = {}
                torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, task))
            self._pending[task][id(watch)] = watch

    def _finish(self, task: int) -> None:
        with self._lock:
            watches = list(self._pending.pop(task, {}).values())
        self._judge(watches)

    def _judge(self, watches: list[CheckedCall]) -> None:
        """The one read. Raises RerunMismatch for the first unit with tensors that differ."""
        seen = [(watch, compared) for watch in watches for compared in watch.take()]
        verdicts = read([compared for _, compared in seen])
        wrong: dict[CheckedCall, list[Compared]] = {}
        for (watch, compared), (same, away) in zip(seen, verdicts, strict=True):
            if same:
                continue
            if compared.tolerance is not None and away <= compared.tolerance:
                self._does_not_repeat(watch.sentinel, away)
            else:
                wrong.setdefault(watch, []).append(compared)
        for watch in watches:
            if watch not in wrong:
                watch.sentinel.proven(watch, sum(1 for owner, _ in seen if owner is watch))
        for watch, different in wrong.items():
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise self.noted(watch.sentinel.mismatch(watch.step, different[0].what + more))

    def noted(self, error: RerunMismatch) -> RerunMismatch:
        """The error that ends a backward. In a thread of the user's own it ends no more than that thread."""
        if not isinstance(threading.current_thread(), (threading._MainThread, threading._DummyThread)):  # type: ignore[attr-defined]
            self._in_a_thread = error
        return error

    def _does_not_repeat(self, unit: UnitSentinel, away: float) -> None:
        """A device's kernels give other last bits each time: said once."""
        if self.repeats:
            self.repeats = False
            warnings.warn(
                f"kernels of {unit.name} do not repeat themselves bit by bit on this device (distance {away:.1e}), so "
                "what runs again is compared within rounding only; torch.use_deterministic_algorithms(True) lets it be "
                "compared bit by bit",
                stacklevel=2,
            )


class UnitSentinel:
    """What is known about one attached unit: when it is to be checked next, and what has been checked."""

    def __init__(self, sentinels: Sentinels, name: str) -> None:
        self.sentinels, self.name = sentinels, name
        self.calls = self.checks = self.tensors = self.spots = 0
        self.places: Places | None = None  # where tensors are looked at in every call
        self.last_proven: int | None = None
        self.unchecked: Counter[str] = Counter()
        self._due = self._gap = 1
        self._proven = 0  # calls
        self._code: Code | None = None

    def watch(
        self, module: nn.Module, *, code: Code | None = None, hold: int | None = None, anew: bool = False
    ) -> CheckedCall | None:
        """A call begins: its watch where it is to be checked; ``anew``: it is. ``hold`` as for CheckedCall."""
        self.calls += 1
        self._code = code = code or self._code or _code_of(self.name, module)
        written_to = code.writes_unseen or self.sentinels.written_to_by_others
        if self.calls < self._due and not (written_to or (anew and not self.sentinels.measured)):
            return None
        if self.sentinels.mode == "sample":
            # tried again soon where no backward follows, but not at every call: it may be an evaluation
            self._due, self._gap = self.calls + self._gap, min(2 * self._gap, WINDOW)
        if _capturing():
            self.unchecked["calls in a CUDA graph that is being captured"] += 1
            return None
        watch = CheckedCall(self, hold and hold * code.writes_unseen, code.assigns)
        self.sentinels.open.append(weakref.ref(watch))
        return watch

    def observer(self, watch: CheckedCall | None) -> CheckedCall | SpotCheck | None:
        """What looks at tensors that this call saves and something else will be handed out for."""
        if watch is not None or self.places is None or _capturing():
            return watch
        return SpotCheck(self, self.places)

    def packing(self, watch: CheckedCall | None) -> Packing | None:
        """What is to be told of every such tensor."""
        observer = self.observer(watch)
        return None if observer is None else observer.packed

    def proven(self, watch: CheckedCall, tensors: int) -> None:
        """All that a backward was given in a watched call's place was right."""
        self.checks += 1
        self.tensors += tensors
        self.last_proven = watch.step
        self._gap = 1
        # a backward inside of the forward, or through a part of the graph, may have proven it before
        self._proven, watch.proven = self._proven + (not watch.proven), True
        if self.sentinels.mode == "all":
            return
        if self._proven == FIRST_CALLS:
            self.past_first(self.sentinels.units.index(self))
        else:
            self._due = self.calls + (WINDOW if self._proven > FIRST_CALLS else 1)

    def mismatch(self, step: int, what: str) -> RerunMismatch:
        """The error for ``what`` was not as forward had computed it."""
        name, last = self.name, self.last_proven
        since = f"last proven right in step {last}" if last is not None else "never proven right"
        back = f"go back to a checkpoint of step {last} or before" if last is not None else "start again"
        return RerunMismatch(
            f"backward of {name} was not given what its forward had computed (step {step}, {since}): {what}. Do not "
            "use the gradients of this backward",
            remedy=f"{_CAUSES}\nUse `save` for {name}, or take what changes out of its forward, and {back}.",
        )

    def past_first(self, index: int) -> None:
        """The first calls are over. From here on units take turns."""
        self._proven = max(self._proven, FIRST_CALLS)
        if self.sentinels.mode == "sample":
            self._due = self.calls + 1 + (index + 1) * WINDOW // (len(self.sentinels.units) + 1)


class CheckedCall:
    """One call that is checked. ``step`` is the step that it belongs to. ``assigns``: its code does so to a ``.data``.

    With ``hold`` no more than so many bytes of what is saved are held until the forward has ended; what is beyond is
    fingerprinted when it is saved.
    """

    def __init__(self, sentinel: UnitSentinel, hold: int | None, assigns: bool) -> None:
        self.sentinel, self.sentinels, self.assigns = sentinel, sentinel.sentinels, assigns
        self.step = sentinel.sentinels.step or sentinel.calls
        self.proven = False
        self._room, self._since = hold, sequence_nr()
        self._fit: list[int] = []  # entries that later calls can look at
        self._last: int | None = None
        self._entries: list[WatchedTensor] = []
        self._compared: list[Compared] = []
        self._state: list[tuple[str, torch.Tensor, Form, torch.Tensor]] = []
        self.known: dict[Place, torch.Tensor] = {}  # fingerprints of the unit's own state, as it is now

    # The first forward.

    chosen, beyond = None, 0  # all tensors are looked at

    def look_at(self, number: int, tensor: torch.Tensor) -> WatchedTensor:
        """Autograd saves a tensor, the one of this number. As ``packed``."""
        return self.packed(tensor)

    def packed(self, tensor: torch.Tensor) -> WatchedTensor:
        """Autograd saves a tensor, and something else will be handed out for it."""
        entry = WatchedTensor(self, len(self._entries), tensor)
        self._entries.append(entry)
        if can_be_spotted(tensor, self._since):
            self._fit.append(entry.number)
            self._last = entry.number if is_computed(tensor, self._since) else self._last
        if self._room is not None and entry.held is not None:
            self._room -= tensor.nbytes
            if self._room < 0:
                entry.let_go()
        return entry

    @eagerly
    def forward_ended(self) -> None:
        """The unit's forward has ended."""
        self.sentinel.places = Places(len(self._entries), self._fit, self._last)
        for entry in self._entries:
            entry.let_go()
        if self.sentinels.written_to_by_others:
            for entry in self._entries:
                entry.hold_memory()

    @eagerly
    def look_again(self) -> None:
        """What the originals hold now, as far as they live, is what backward would read."""
        for entry in self._entries:
            entry.look_again()

    # Backward.

    def before_rerun(self, module: nn.Module) -> None:
        """The unit is about to run again."""
        named = (*module.named_parameters(), *module.named_buffers())
        known = [(name, local) for name, t in named if why_not(local := local_part(t)) is None]
        self._state = [(name, t, form := form_of(t), fingerprint(t, form)) for name, t in known]
        self.known = {memory_of(t, form): found for _, t, form, found in self._state}
        self.look_again()

    def after_rerun(self) -> None:
        """It has run: its parameters and buffers must be what they were."""
        self.known = {}
        for name, tensor, form, before in self._state:
            if why_not(tensor) is None and form.of(tensor) == form:
                found = self.known[memory_of(tensor, form)] = fingerprint(tensor, form)
                what = f"{name}, which running it again changed"
                self._compared.append(Compared(what, before, found, stream_of(tensor.device)))
        self._state = []
        self.sentinels.judge_at_end(self)

    def add(self, compared: Compared) -> None:
        self._compared.append(compared)
        self.sentinels.judge_at_end(self)

    def take(self) -> list[Compared]:
        """What was compared since this was asked last."""
        taken, self._compared = self._compared, []
        return taken


class WatchedTensor:
    """A saved tensor of a watched call: what its memory holds, by fingerprint, and how to look at it while it lives.

    ``held`` is the tensor itself until the unit's forward has ended.
    """

    def __init__(self, watch: CheckedCall, number: int, tensor: torch.Tensor) -> None:
        self._watch, self.number = watch, number
        self._print: torch.Tensor | None = None
        self._sketch: torch.Tensor | None = None
        self.held: torch.Tensor | None = None
        self._memory: torch.UntypedStorage | None = None
        tensor = local_part(tensor)
        if (why := why_not(tensor)) is not None:
            watch.sentinel.unchecked[why] += 1
            return
        self._original = weakref.ref(tensor)
        with quietly(), torch._C.DisableTorchFunction():
            self.held = tensor.detach()
            self._probe, self._version = probe_of(tensor), tensor._version
        self._form = form_of(tensor)
        self._storage = weakref.ref(tensor.untyped_storage())
        self._layout = layout_of(tensor)
        self._place = memory_of(tensor, self._form)
        self._stream = stream_of(tensor.device)

    def let_go(self) -> None:
        """Fingerprint what is held, and hold it no longer."""
        tensor, self.held = self.held, None
        if tensor is None or tensor._version != self._version:
            return  # autograd's own check is for this
        why = _ELSEWHERE if stream_of(tensor.device) != self._stream else why_not(tensor)
        if why is not None:
            self._watch.sentinel.unchecked[why] += 1
        else:
            self._look_at(tensor)

    def hold_memory(self) -> None:
        """What lives on now is an input or output, or state: see what others write to it until the whole model's
        forward has ended, although nobody but autograd, without the choice, would hold it for so long."""
        self._memory = self._storage() if self._print is not None else None

    def _look_at(self, tensor: torch.Tensor) -> None:
        self._print = fingerprint(tensor, self._form)
        if tensor.is_floating_point() and not repeats(tensor.device):
            self._sketch = unseen_sums(tensor)

    def look_again(self) -> None:
        """Fingerprint the original as it is now, where it lives and nobody changed it in a way that autograd sees."""
        memory, self._memory = self._memory, None  # alive until this has ended
        if self._print is None or self._probe._version != self._version:
            return
        if stream_of(self._form.device) != self._stream:
            return
        storage, original = memory or self._storage(), self._original()
        if original is not None and original.untyped_storage()._cdata != (storage and storage._cdata):
            # its memory was exchanged by `.data`: autograd would hold the tensor, and read what it has now
            if why_not(original) is not None or self._form.of(original) != self._form:
                return
            storage, self._layout = original.untyped_storage(), layout_of(original)
            self._place = memory_of(original, self._form)
        if storage is None or not storage.nbytes():
            return
        if (known := self._watch.known.get(self._place)) is not None and self._sketch is None:
            self._print = known
            return
        with quietly(), torch._C.DisableTorchFunction():
            self._look_at(self._form.flip(laid_out_on(storage, self._form.device, self._layout)))

    def handed(self, value: torch.Tensor) -> None:
        """Backward is given ``value`` for it. Compared later, with all others at once."""
        if self._print is None:
            return
        value, node, why = local_part(value), current_node(), None
        if stream_of(value.device) != self._stream:
            why = _ELSEWHERE
        elif node is not None and left_unwritten(node, value):
            why = "a tensor that its kernel need not write"
        elif why_not(value) is not None or self._form.of(value) != self._form:
            why = "a tensor that came back in another layout"
        if why is not None:
            self._watch.sentinel.unchecked[why] += 1
            return
        distance = tolerance = None
        if self._sketch is not None:
            distance, tolerance = distance_of(self._sketch, unseen_sums(value)), tolerance_of(value.dtype)
        found = self._watch.known.get(self._place)
        if found is None or value.untyped_storage()._cdata != self._place[0]:
            found = fingerprint(value, self._form)
        what = tensor_read(self._form.dtype, self._form.size, self.number)
        self._watch.add(Compared(what, self._print, found, self._stream, distance, tolerance))


def _capturing() -> bool:
    """Whether what runs goes into a CUDA graph, and will happen only when that is replayed."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
