"""One call of a unit: its forward keeps the inputs alone, and backward recomputes what autograd had saved.

``pack`` gives autograd a number in the place of every saved tensor. The first ``unpack`` runs the forward again, under
the same random state, autocast and module state, until every number has its tensor. Each tensor is then returned once
and released. A number that is asked for again (a second backward over a kept graph) has the call recomputed again.

Small tensors of indices that the forward made for itself, such as the experts that a router chose, are kept. A
recomputation writes them over its own before anything reads these, so that ties, or scores with other last bits, cannot
send a token to another expert. What something else still holds when the forward has ended is not written over: the
recomputation may be given that very tensor.

Ownership: nodes of the graph hold the bound ``unpack`` and with it the frame. The frame holds its inputs as autograd
holds saved tensors, so the graph before it stays alive as without a plan. It holds no tensor of its own graph: a graph
that holds its output by way of Python is never freed.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from autockpt.checkpointing.arguments import Held, flatten, hold, holders, unflatten, unpack
from autockpt.checkpointing.divergence import CheckedTensor
from autockpt.checkpointing.kv_cache import CannotBeCopied
from autockpt.checkpointing.module_state import Entry, without_graphs
from autockpt.checkpointing.op_recorder import is_plain
from autockpt.checkpointing.replay_context import ReplayContext, one_at_a_time, running_again
from autockpt.checkpointing.unit import CheckpointedUnit, holds_other_values, is_in_pieces
from autockpt.errors import AutockptError, ConflictError, InPlaceError

SMALL_SHARE = 0.125
"""Of the bytes of the unit's largest input: tensors of indices up to that are kept."""
ALL = range(sys.maxsize)
"""The numbers of whatever a call saves."""
_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


class StopRecomputation(Exception):
    """Every number has its tensor. Not a BaseException, because modules run always_call hooks only for Exception."""


class CheckpointFrame:
    """One call of ``unit``. ``forward`` is called with the arguments, now and in each recomputation.

    ``restored_set`` makes a context manager around each recomputation, which restores the set of choices active in
    forward, for plans with several sets. Inputs are held by ``hold``.
    """

    # What the slots hold.
    # The call, for each recomputation:
    #   _unit, _forward, _restored_set  whose call it is, what is called, and in which context
    #   _template, _inputs, _trains     the arguments: their structure, the tensors as held, which of these train
    #   _parameters, _versions          the unit's parameters, and their versions in forward
    #   _context, _before, _training    random state and modes; attributes as they were before; training flags
    # While the forward runs:
    #   _live                           the inputs themselves; None afterwards
    #   _unchecked                      of a checked call, from which it is learned what the unit's forward changes: how
    #                                   many went unchecked before it; None in others
    #   _index_numbers                  the numbers of indices that calls of this kind keep, shared by them
    #   _looked_at                      the numbers that `pack` looks at
    # From forward to backward, by the number of the saved tensor:
    #   _sizes, _indices                how many elements it has; indices that are kept, with their version
    #   _observer, _compared            what compares it with its recomputation, where that is done; its comparison
    # In backward:
    #   _values                         recomputed tensors, with their versions, until autograd asks for them
    #   _filled, _until, _to_end        numbers that have a tensor; the one to stop at; whether to run the whole forward
    #   _shared                         storages of buffers that are written to when the recomputation ends
    #
    # There is no dictionary, and few objects in all: the more there are that live until backward, the oftener Python's
    # garbage collector looks through everything.
    __slots__ = (
        *("_before", "_compared", "_context", "_filled", "_forward", "_index_numbers", "_indices", "_inputs", "_live"),
        *("_looked_at", "_observer", "_parameters", "_restored_set", "_shared", "_sizes", "_template", "_to_end"),
        *("_training", "_trains", "_unchecked", "_unit", "_until", "_values", "_versions"),
        "name",
    )

    def __init__(
        self,
        unit: CheckpointedUnit,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        restored_set: Callable[[], AbstractContextManager[Any]] | None = None,
        hold: Callable[[list[torch.Tensor]], list[Held]] = hold,
    ) -> None:
        self._unit, self.name, self._forward, self._restored_set = unit, unit.name, forward, restored_set
        live: list[torch.Tensor] = []
        generators: list[torch.Generator] = []
        self._live: list[torch.Tensor] | None = live  # until the forward is over
        self._parameters = parameters = unit.parameters()
        try:
            self._template = flatten((args, kwargs), live, generators)
            self._training = training = unit.training()
            kind = unit.kind_of(live, training)
            self._unchecked = unchecked = kind.schedule.next()
            self._inputs = hold(live)
            self._versions = [parameter._version for parameter in parameters if parameter is not None]
            self._context = ReplayContext(kind.accelerators, generators, unchecked is not None or unit.draws_in_python)
        except RuntimeError as error:
            known = isinstance(error, RecursionError | CannotBeCopied)
            if known or any(word in str(error) for word in ("nference", "capture")):
                raise _unreadable(error, unit.name) from error
            raise
        self._trains = [tensor.requires_grad for tensor in live]
        self._before: list[Entry] = unit.state.take() if unit.state.changing else []
        self._index_numbers = kind.indices
        self._indices: dict[int, tuple[torch.Tensor, int]] = {}
        self._observer = unit.check.observer(checked=unchecked is not None)
        # frames that keep outputs look at more
        self._looked_at: Collection[int] = kind.indices if unchecked is None and self._observer is None else ALL
        self._compared: dict[int, CheckedTensor] = {}
        self._sizes: list[int] = []  # numbers of elements of what is saved
        self._values: dict[int, tuple[torch.Tensor, int]] = {}

    # In forward.

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The first, ordinary forward, with the caller's own containers.

        Raises ConflictError where it did what cannot be done twice. In calls that are not checked it is backward that
        finds changed inputs and parameters.
        """
        state, live = self._unit.state, self._live or []
        before = None if self._unchecked is None else (list(map(_version, live)), state.take_all(), state.effects())
        with saved_tensors_hooks(self.pack, self.unpack):
            output = self._forward(*args, **kwargs)
        if before is not None:
            self._learn_effects(live, *before)
        self._before = self._before and [*without_graphs(self._before)]
        self._live = None
        if self._observer is not None:
            self._observer.forward_ended()
        if self._indices:  # of which a checked call has let go by now
            self._keep_own_indices()
        return output

    def _learn_effects(self, live: list[torch.Tensor], given: list[int], everything: Any, effects: Any) -> None:
        """A checked forward has ended, before which inputs had the versions ``given``, and modules held this."""
        unit, state = self._unit, self._unit.state
        for what, tensors, versions in (("inputs", live, given), ("parameters", self._present(), self._versions)):
            changed = [tensor for tensor, version in zip(tensors, versions, strict=True) if tensor._version != version]
            if changed:
                raise ConflictError(
                    f"{unit.name} changes one of its {what} (shape {tuple(changed[0].shape)}) in place",
                    remedy=f"Use `save`, `offload` or `remake` on {unit.name}, or plan the block around it, in which "
                    "inputs are recomputed; or leave out an operation's inplace=True.",
                )
        if not unit.has_same_modules():
            # it made or exchanged modules: a recomputation runs those that are there now
            self._unit = unit = CheckpointedUnit(unit.name, unit.module, unit.check)
            self._parameters, self._training = unit.parameters(), unit.training()
            self._versions = list(map(_version, self._present()))
        installed = state.installed(effects)
        self._before = state.learn(everything, unchecked=self._unchecked or 0, installed=installed)
        unit.draws_in_python |= self._context.forget_python_unless_drawn()

    def _present(self) -> list[torch.Tensor]:
        return [parameter for parameter in self._parameters if parameter is not None]

    def pack(self, tensor: torch.Tensor) -> int:
        """The hook for what autograd saves."""
        sizes = self._sizes
        number = len(sizes)
        sizes.append(tensor.numel())
        if number in self._looked_at:
            self._look_at(number, tensor)
        return number

    def _look_at(self, number: int, tensor: torch.Tensor) -> None:
        if tensor.dtype is torch.int64 and tensor.is_contiguous() and self._are_few(tensor):
            self._indices[number] = tensor.detach(), tensor._version
        if self._observer is not None:
            self._compared[number] = self._observer.look_at(number, tensor)

    def _are_few(self, indices: torch.Tensor) -> bool:
        if not indices.dim():  # the seed or the offset of attention's dropout
            return False
        sizes = (tensor.nbytes for tensor in self._live or [] if tensor.is_floating_point())
        return is_plain(indices) and indices.nbytes <= SMALL_SHARE * max(sizes, default=0)

    def _keep_own_indices(self) -> None:
        """Keep those that nothing but this frame holds now that the forward has ended, and look for these next time."""
        kept = Counter(indices.untyped_storage()._cdata for indices, _ in self._indices.values())
        for number, (indices, _) in [*self._indices.items()]:
            if holders(indices) == kept[indices.untyped_storage()._cdata]:
                self._index_numbers.add(number)
            else:
                self._index_numbers.discard(number)
                del self._indices[number]

    # In backward.

    def unpack(self, number: int) -> torch.Tensor:
        """The hook for what backward asks for. Raises InPlaceError where the unit changes in place what backward needs,
        as autograd itself would."""
        held = self._values.pop(number, None)
        # what an earlier backward left may have been changed since
        if held is None or held[0]._version != held[1]:
            self._recompute(number)
            held = self._values.pop(number)
            if held[0]._version != held[1]:
                what, remedy = f"that {self.name} saved", "Replace the in-place operation inside this unit."
                raise InPlaceError.of(held[0].size(), held[0]._version, held[1], what, remedy)
        if (comparison := self._compared.get(number)) is not None:
            comparison.handed(held[0])
        return held[0]

    def _recompute(self, number: int) -> None:
        """Run the forward again until every number has its tensor, ``number`` among them.

        Raises InPlaceError where something that it read was changed since, ConflictError where it does not do again
        what it did.
        """
        with one_at_a_time(self.name), torch.enable_grad():
            if number not in self._values or self._values[number][0]._version != self._values[number][1]:
                self._fill()  # or the thread of another device has done it

    def _fill(self, *, to_end: bool = False) -> Any:
        """Run the forward again and have its tensors. Returns its output where it runs ``to_end``."""
        unit, output = self._unit, None
        exchanged = self._check_modules()
        inputs = self._take_inputs()
        for comparison in self._compared.values():
            comparison.look_again()
        if self._observer is not None:
            self._observer.before_rerun(unit.module)
        self._filled, self._until, self._to_end = 0, len(self._sizes), to_end
        try:
            output = self._run_again(inputs, exchanged)
        except Exception as error:
            # what runs TorchScript makes an error of its own of StopRecomputation
            if to_end or self._filled != len(self._sizes):
                self._values.clear()
                shown = _user_error(error, unit.name)
                raise shown from (error.__cause__ if shown is error else error)
        if self._filled != len(self._sizes):
            self._values.clear()
            what = f"saved {len(self._sizes)} tensors in forward and {self._filled} when it ran again"
            raise diverged(unit.name, what)
        if self._observer is not None:
            self._observer.after_rerun()
        return output

    def _run_again(self, inputs: list[torch.Tensor], exchanged: Sequence[Entry]) -> Any:
        unit = self._unit
        args, kwargs = unflatten(self._template, inputs)
        with (
            running_again(unit.name),
            nullcontext() if self._restored_set is None else self._restored_set(),
            unit.state.restored([*self._before, *exchanged], self._training, unit.training()) as self._shared,
            self._context,
            # hooks in any case: backward may have been called inside a forward whose own hooks are in force
            saved_tensors_hooks(self.repack, identity),
        ):
            return self._forward(*args, **kwargs)

    def repack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The hook for what a recomputation saves."""
        number, sizes = self._filled, self._sizes
        if number == len(sizes):
            if self._to_end:
                raise diverged(self.name, f"saved {number} tensors in forward and more when it ran again")
            raise StopRecomputation  # again: the unit caught the first
        value = tensor.detach() if tensor.requires_grad else tensor
        if (size := value.numel()) != sizes[number]:
            what = f"saved a tensor of {sizes[number]} elements in forward and one of {size} when it ran again"
            raise diverged(self.name, what)
        if self._shared and value.untyped_storage()._cdata in self._shared:
            value = value.clone()  # a buffer that is about to be written to
        if (kept := self._indices.get(number)) is not None and kept[0]._version == kept[1]:
            value.data.copy_(kept[0])  # by way of `data` it counts as no change
        self._values[number] = value, value._version
        self._filled = number = number + 1
        if number == self._until:
            self._reached()
        return value

    def _reached(self) -> None:
        """As many numbers have their tensor as was waited for: all."""
        if not self._to_end:
            raise StopRecomputation

    def _take_inputs(self) -> list[torch.Tensor]:
        """The inputs without their history."""
        # A gradient taken inside the forward uses the live inputs: outer saved-tensor hooks may allow only one unpack,
        # which the real backward needs.
        held = self._live
        if held is None:
            name = self.name
            held = [h[0] if type(h) is tuple and h[0]._version == h[1] else unpack(h, name) for h in self._inputs]
        pairs = zip(held, self._trains, strict=True)
        return [tensor.detach().requires_grad_() if trains else tensor.detach() for tensor, trains in pairs]

    def _check_modules(self) -> Sequence[Entry]:
        """See that the unit has the parameters of its forward. Returns those that have other values now.

        Raises InPlaceError where modules were exchanged or parameters changed, ConflictError where parameters are in
        pieces on several devices and cannot be gathered.
        """
        unit = self._unit
        if not unit.has_same_modules():
            raise InPlaceError(
                f"modules or parameters of {unit.name} were exchanged or added between forward and backward",
                remedy=f"Change modules after backward, or use `save` or `offload` on {unit.name}.",
            )
        if [parameter._version for parameter in self._parameters if parameter is not None] != self._versions:
            raise InPlaceError(
                f"a parameter of {unit.name} needed for gradient computation has been modified by an inplace operation "
                "between forward and backward",
                remedy="Change it after backward: an optimizer step before the last backward of a graph does this.",
            )
        exchanged = unit.exchanged(self._parameters)
        if any(map(is_in_pieces, exchanged)) and (unshard := getattr(unit.module, "unshard", None)):
            # FSDP2 gathers them; its own backward, or the end of this one, lets them go again
            unshard()  # type: ignore[operator]
            exchanged = unit.exchanged(self._parameters)
        if any(map(is_in_pieces, exchanged)) or unit.lost_memory():
            raise ConflictError(
                f"the parameters of {unit.name} are sharded while it runs again in backward",
                remedy="Choose recompute or save for it, or keep parameters whole after forward "
                "(FullyShardedDataParallel: SHARD_GRAD_OP; fully_shard: reshard_after_forward=False, or shard a "
                "segment's units together).",
            )
        # as ``functional_call`` put them in the place of parameters
        return [entry for entry in exchanged if holds_other_values(entry)]


def identity(tensor: Any) -> Any:
    """The hook for unpacking what is not packed."""
    return tensor


def diverged(unit: str, what: str) -> ConflictError:
    """The error for a unit that is not repeatable."""
    return ConflictError(
        f"{unit} {what}: the recomputation differs from the forward",
        remedy="Use `save` or `offload` for it; something that it reads has changed between forward and backward. "
        "(A function of torch.jit.script changes in its first calls: run two steps before the plan is applied.)",
    )


def _user_error(error: Exception, unit: str) -> Exception:
    """The error that a recomputation raised and the forward had not, as it is raised to the user."""
    if isinstance(error, AutockptError):
        return error
    if isinstance(error, (StopIteration, LookupError, AttributeError, AssertionError, TypeError, ValueError)):
        # as where the first run has used up an iterator, or asks for the graph that its input came from
        return diverged(unit, f"raised {type(error).__name__} when it ran again in backward, which it did not before")
    if isinstance(error, RuntimeError):  # may be that memory is out, which others know by its type and message
        error.add_note(
            f"autockpt: {unit} ran again for backward and had not raised this in forward. Unless memory or a device "
            "failed, something that it reads has changed in between: use `save` or `offload` there."
        )
    return error  # a time limit, a file, an exception of the user's own: handlers know it by its type


def _unreadable(error: RuntimeError, unit: str) -> ConflictError:
    """The error for a call whose arguments, versions or random states cannot be read."""
    return ConflictError(
        f"what {unit} is given, or the random state, cannot be held for backward: {error}",
        remedy=f"Use `save` on {unit}. Tensors that are made under torch.inference_mode (make them under "
        "torch.no_grad), KV caches (but for a DynamicCache that is not offloaded), containers that hold themselves "
        "and CUDA graphs that are being captured cause this.",
    )
