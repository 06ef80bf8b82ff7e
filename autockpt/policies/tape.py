"""What one forward of a unit computed, op by op, so that single tensors can be made again without running the unit.

A tape notes the ops below autograd: which storages each read, and in which layout. What autograd saves is looked up
there. A tensor that can be made from others, which are held anyway or are smaller, is replaced by an empty slot; at its
first use in backward exactly the ops that lead to it run, each once, and what they make on the way for other slots
fills these. No Python of the unit runs a second time: nothing draws random numbers or changes buffers again, and no
graph is built. (Rematerialization of single tensors: Griewank and Walther 2000; MONeT, arXiv:2010.14501.)

Only ops that are known to do the same twice are run again; everything else that is saved is held as it is. So
is whatever was changed in place, or handed to those who may change it unseen.

Ownership: an autograd graph holds slots, a slot its source, a source its op, an op the sources that it reads. The tape
itself lives only as long as the forward.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from autockpt.checkpointing.divergence import Comparison
from autockpt.checkpointing.fingerprint import Geometry, geometry_of
from autockpt.checkpointing.frame import diverged
from autockpt.checkpointing.replay_context import running_again
from autockpt.errors import InPlaceError
from autockpt.policies.compiling import run_as_it_is
from autockpt.policies.rerun_state.surroundings import outside_inference, switched, switches, under, user_dispatch_modes
from autockpt.policies.saved_outputs import alias
from autockpt.policies.slots import Empty


class Origin:
    """One storage that a unit's forward made or read, and how to have it in backward.

    ``held`` is a tensor on it that is kept until then; else ``op`` makes it, as its output number ``index``; with
    neither it is lost. ``form`` is the layout of the tensor that was seen first, ``made`` a weak reference to it.
    ``free``: it can be made from what is held anyway. ``read``: an op on the tape reads it. ``born``: after how many
    functions it was met.
    """

    __slots__ = (
        *("__weakref__", "_again", "_again_version", "born", "dtype", "form", "free", "held", "index", "made"),
        *("nbytes", "op", "read", "slots", "storage", "version"),
    )

    storage: weakref.ref[torch.UntypedStorage]

    def __init__(self, nbytes: int, dtype: torch.dtype, form: Geometry, index: int = 0) -> None:
        self.nbytes, self.dtype, self.form, self.index = nbytes, dtype, form, index
        self.made: weakref.ref[torch.Tensor] | None = None
        self.held: torch.Tensor | None = None
        self.op: RerunOp | None = None
        self.slots: list[weakref.ref[RemadeSlot]] = []
        self.free = self.read = False
        self.version = self.born = self._again_version = 0
        self._again: weakref.ref[torch.Tensor] | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Origin:
        """That of a tensor which is met for the first time."""
        source = cls(storage.nbytes(), tensor.dtype, geometry_of(tensor))
        source.storage, source.made, source.version = weakref.ref(storage), weakref.ref(tensor), tensor._version
        return source

    def without_memory(self) -> Origin:
        """The same source of another call, of which nobody has noted the ops."""
        source = Origin(self.nbytes, self.dtype, self.form, self.index)
        source.free = source.read = True
        return source

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep the bytes by a tensor on this storage. How it was made is of no use any more."""
        held: torch.Tensor = alias(tensor)
        self.held, self.version = held, held._version
        self.op = self.made = None
        self.free = True
        for slot in self.waiting():  # for what is held, not for a copy that was made along with something else
            slot.value = None

    def present(self) -> torch.Tensor | None:
        """The tensor that was seen first, where it is alive and was not changed since."""
        tensor = self.made() if self.made is not None else None
        return tensor if tensor is not None and tensor._version == self.version else None

    def at_hand(self, unit: str) -> torch.Tensor | None:
        """What is held, or was made again and is still there. Raises InPlaceError where that was changed in place."""
        if self.held is not None:
            if self.held._version != self.version:
                tensor = f"{tuple(self.held.size())} that {unit} makes others from"
                remedy = "Change it after backward: an optimizer step before the last backward of a graph does this."
                raise InPlaceError.of(tensor, self.held._version, self.version, remedy)
            if self.held.untyped_storage().nbytes() < self.nbytes:
                raise diverged(
                    unit, "cannot make tensors again from memory that was given back since (sharded weights)"
                )
            return self.held
        again = self._again() if self._again is not None else None
        return again if again is not None and again._version == self._again_version else None

    def fill(self, tensor: torch.Tensor, unit: str) -> None:
        """It was made again: put it where autograd waits for it."""
        if geometry_of(tensor) != self.form or tensor.dtype != self.dtype:
            raise diverged(unit, f"made a tensor {tuple(tensor.size())} otherwise than in forward")
        self._again, self._again_version = weakref.ref(tensor), tensor._version
        for slot in self.waiting():
            slot.fill(tensor)

    def waiting(self) -> list[RemadeSlot]:
        """The slots for it in graphs that are alive."""
        return [slot for ref in self.slots if (slot := ref()) is not None]


class RerunOp:
    """An op that can run again. ``reads`` are its sources, each as often as it is read, in the order in which ``args``
    and ``kwargs`` have a ``TensorArgument``."""

    def __init__(self, number: int, func: Any, args: list[Any], kwargs: dict[str, Any], reads: list[Origin]) -> None:
        self.number, self.func, self.args, self.kwargs, self.reads = number, func, args, kwargs, reads
        self.outputs: list[weakref.ref[Origin]] = []

    def run(self, value: Callable[[Origin], torch.Tensor]) -> Any:
        """Its result; ``value`` gives tensors on the sources."""
        given = map(value, self.reads)
        args = [_filled(arg, given) for arg in self.args]
        kwargs = {name: _filled(arg, given) for name, arg in self.kwargs.items()}
        return self.func(*args, **kwargs)

    def makes(self, known: Container[Origin | None]) -> list[Origin]:
        """Such of its outputs as are known and must be made."""
        return [source for ref in self.outputs if (source := ref()) in known and source and source.held is None]

    def on(self, others: Mapping[Origin, Origin]) -> RerunOp:
        """The same op of another call, whose sources stand for those of this one."""
        reads = [others[source] for source in self.reads]
        op = RerunOp(self.number, self.func, self.args, self.kwargs, reads)
        for made in self.makes(others):
            others[made].op = op
            op.outputs.append(weakref.ref(others[made]))
        return op


class TensorArgument(NamedTuple):
    """Stands for a tensor among the arguments of an op: how it lay in its source."""

    geometry: Geometry


def _filled(arg: Any, given: Iterator[torch.Tensor]) -> Any:
    if type(arg) is TensorArgument:
        return _laid_out(next(given), arg.geometry)
    return [_filled(part, given) for part in arg] if type(arg) is list else arg


def _laid_out(base: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The tensor of this layout on the storage of ``base``."""
    return base if geometry_of(base) == geometry else base.as_strided(*geometry)


class RemadeSlot(Empty):
    """One for a tensor that will be made again by itself."""

    __slots__ = ("geometry", "maker", "source")

    def __init__(self, maker: Maker, source: Origin, geometry: Geometry, entry: Comparison | None = None) -> None:
        self.value, self.version, self.entry = None, 0, entry
        self.maker, self.source, self.geometry = maker, source, geometry

    @run_as_it_is
    def unpack(self) -> torch.Tensor:
        """Raises InPlaceError where something that it is made from was changed in place since."""
        if self.entry is not None:
            self.entry.look_again()
        with self.maker.lock:
            self.maker.put_sources_together()
            base, self.value = self.value, None
            if base is None or base._version != self.version:
                base = self.maker.make(self.source)
                self.value = None  # it was filled along with the others
        tensor = _laid_out(base, self.geometry)
        if self.entry is not None:
            self.entry.handed(tensor)
        return tensor


class Maker:
    """Runs ops again for one call of a unit, under the dispatch modes and with the kernels that are in force now."""

    def __init__(self, unit: str) -> None:
        self.unit, self.modes, self.switches = unit, user_dispatch_modes(), switches()
        self.lock = threading.RLock()

    def put_sources_together(self) -> None:
        """Told before the source of a slot is asked for."""

    def make(self, wanted: Origin) -> torch.Tensor:
        """A tensor on the storage of a source, in its form.

        Raises InPlaceError where what it is made from was changed since, ConflictError where an op does not make again
        what it made.
        """
        values: dict[Origin, torch.Tensor] = {}
        ops = self._needed(wanted, values)
        readers = Counter([wanted, *(source for op in ops for source in op.reads)])
        kernels = nullcontext() if switches() == self.switches else switched(self.switches)
        below, modes = torch._C.DisableTorchFunction(), under(self.modes)
        # ops do just what their call says: no casts, no graph, nothing that a function mode makes of it. Gradients are
        # enabled as whenever a unit runs again.
        plainly = torch._C._DisableAutocast()
        with outside_inference(), torch.enable_grad(), plainly, below, running_again(self.unit), modes, kernels:
            for op in ops:
                self._run(op, values, readers)
        return values[wanted]

    def _needed(self, wanted: Origin, values: dict[Origin, torch.Tensor]) -> list[RerunOp]:
        """The ops that lead to a source, in their order; what is at hand is put into ``values``."""
        found: dict[int, RerunOp] = {}
        open_ends = [wanted]
        while open_ends:
            source = open_ends.pop()
            if source in values or (source.op is not None and source.op.number in found):
                continue
            if (tensor := source.at_hand(self.unit)) is not None:
                values[source] = tensor
            elif source.op is None:
                raise diverged(self.unit, "has lost a tensor that others are made from")
            else:
                found[source.op.number] = source.op
                open_ends.extend(source.op.reads)
        return [found[number] for number in sorted(found)]

    def _run(self, op: RerunOp, values: dict[Origin, torch.Tensor], readers: Counter[Origin]) -> None:
        """Run an op, fill what waits for its outputs, and let go of what nobody reads any more."""
        made = op.run(values.__getitem__)
        outputs = made if type(made) in (tuple, list) else (made,)
        for ref in op.outputs:
            if (source := ref()) is not None and source.held is None:
                tensor = outputs[source.index]
                source.fill(tensor, self.unit)
                if source in readers:
                    values[source] = tensor
        for source in op.reads:
            readers[source] -= 1
            if not readers[source]:
                values.pop(source, None)
