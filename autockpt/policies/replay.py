"""Running a unit's forward a second time, with everything it read as it was the first time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from autockpt.checkpointing.autocast import autocast_block, without_remembered_casts
from autockpt.checkpointing.frame import refuse_inference
from autockpt.checkpointing.replay_context import running_again
from autockpt.checkpointing.unit import holds_other_values
from autockpt.errors import ConflictError, InPlaceError
from autockpt.policies.arguments import hidden_tensors, put_together, take_apart, tensors_of
from autockpt.policies.attachment import Attachment, call_inner
from autockpt.policies.base import setting
from autockpt.policies.casts import CastsUsed, inside_autocast, leaves_met
from autockpt.policies.conflicts import sequence_nr
from autockpt.policies.kvcache import StandIn, with_caches
from autockpt.policies.rerun_state.state import Memory, UnitState
from autockpt.policies.rerun_state.structure import UnitStructure
from autockpt.policies.rerun_state.surroundings import Surroundings, user_function_modes
from autockpt.policies.slots import Enough, as_it_is

_current = threading.local()


_init_handle = RemovableHandle.__init__


def _noted_handle(self: RemovableHandle, *args: Any, **kwargs: Any) -> None:
    _init_handle(self, *args, **kwargs)
    if (made := getattr(_current, "handles", None)) is not None:
        made.append(self)


@functools.cache
def _note_handles() -> None:
    """From now on, in all of the process. PyTorch makes a handle for whatever hook is registered, on tensors, modules
    and nodes of autograd's, and keeps no list of those on the nodes."""
    RemovableHandle.__init__ = _noted_handle  # type: ignore[method-assign]


@contextmanager
def _without_its_hooks() -> Iterator[None]:
    """Hooks that are registered in here are taken away at the end: those of the ordinary forward are there already."""
    _note_handles()
    made: list[RemovableHandle] = []
    with setting(_current, "handles", made):
        try:
            yield
        finally:
            for handle in made:
                handle.remove()


@functools.cache
def pass_over_what_is_set_to_itself() -> None:
    """From now on, in all of the process. Registering a parametrization sets the weight to itself, which changes its
    version alone; PEFT's LoRA on parameters, as on experts, registers one in every forward."""
    maybe_set: Any = parametrize._maybe_set

    def pass_over(dest: torch.Tensor, src: torch.Tensor) -> None:
        if dest is not src:
            maybe_set(dest, src)

    parametrize._maybe_set = pass_over


class ReplayState(Attachment):
    """A unit's attachment, with what its calls taught about its state."""

    has_check: ClassVar[bool] = True

    def __init__(self, unit: str) -> None:
        super().__init__(unit)
        pass_over_what_is_set_to_itself()
        self._cache_structure: UnitStructure | None = None
        self.memory = Memory(unit)

    def in_mid_training(self) -> None:
        self.memory.in_mid_training()

    def structure(self, module: nn.Module) -> UnitStructure:
        """The unit's modules as they are now. Where they are others, what calls taught is forgotten."""
        known = self._cache_structure
        if known is not None and known.still_is():
            return known
        if known is not None:
            self.memory = Memory(self.unit)
        self._cache_structure = UnitStructure(module)
        return self._cache_structure


class Replay:
    """One call of a unit: first the ordinary forward, and the same again whenever backward asks for it.

    ``tensors`` are all tensors among the arguments, however nested, to be handed in by position at every call: so
    autograd holds them, checks their versions and knows their devices. Everything else stays in a template. They are
    let go of when the first forward ends.
    """

    def __init__(self, module: nn.Module, state: ReplayState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self.state = module, state
        self.tensors: list[torch.Tensor] = []
        objects: list[Any] = []
        self.template = take_apart((args, kwargs), self.tensors, objects)
        self.first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._caches = any(type(o) is StandIn for o in objects)
        self._structure = state.structure(module)
        try:
            self._inputs = _Versions(self.tensors)
            self.hidden = _Versions(list(hidden_tensors(objects))) if objects else _NONE
            self.parameters = _Versions(self._structure.parameters())
        except RuntimeError as error:
            refuse_inference(error, state.unit)
            raise
        self.surroundings = Surroundings((*self.tensors, *self.parameters.tensors))
        self._block, self._outdated = autocast_block(), ""
        self._changed: list[torch.Tensor] = []  # inputs of which autocast may have earlier casts
        # dispatch modes that list or count ops are to see those of the second run, too
        self.reached = UnitState(state.memory, module, [*objects, *user_function_modes()], self.tensors)
        if self._block is not None:
            weights = (*self.parameters.tensors, *self.hidden.tensors, *self.reached.tensors())
            self._outdated = "weights" if leaves_met.changed(self._block, weights) else ""
            self._changed = leaves_met.changed(self._block, self.tensors)
        self._over = False
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        if state.memory.code.uses_gradients:
            self.takes_gradients()

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self.first is not None:
            # the caller's own containers: a layer may write into a dict that it was given
            args, kwargs = self.first
            self.first = None
            if self._caches:
                args, kwargs = with_caches(args, kwargs)
            begin = sequence_nr()
            output = call_inner(self.module, self.state, args, kwargs)
            if self._changed:  # in a second run they are other tensors, which autocast casts anew
                _, casts = CastsUsed().by(tensors_of(output), begin)
                if any(leaf is changed for leaf, _, own in casts if not own for changed in self._changed):
                    self._outdated = "inputs"
                self._changed = []
            return output
        return self._again(tensors)

    def finish(self) -> None:
        """The first forward has ended. Raises ConflictError where it did what cannot be done twice."""
        self._refuse_changed("inputs", self._inputs.changed() or self.hidden.changed())
        for watch in (self.surroundings, self.reached):
            watch.after()
        if (structure := self.state.structure(self.module)) is not self._structure:  # this forward made modules
            self._structure, self.parameters = structure, _Versions(structure.parameters())
        elif changed := self.parameters.changed():
            known = self.reached.changes()
            self._refuse_changed("parameters", [tensor for tensor in changed if id(tensor) not in known])
            self.parameters = _Versions(self.parameters.tensors)
        self.tensors = []
        self._inputs = _NONE
        self._over = True

    def try_again(self, tensors: Sequence[torch.Tensor], output: Any) -> None:
        """The forward wrote to weights or inputs unseen: try out whether it gives the same again, as where it clamps
        what then stays clamped. Raises ConflictError where it does not; those tensors are left as the forward did."""
        written = [node.obj for node in self.reached.doubts]
        kept = [tensor.detach().clone() for tensor in written]
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        with torch.enable_grad(), saved_tensors_hooks(torch.Tensor.detach, as_it_is):
            again = self._again(tuple(inputs))
        first, second = tensors_of((output, kept)), tensors_of((again, written))
        same = len(first) == len(second) and all(map(_same_bits, first, second))
        for tensor, before in zip(written, kept, strict=True):
            tensor.data.copy_(before)
        self.reached.judge_doubts(same)

    def _refuse_changed(self, what: str, changed: Sequence[torch.Tensor]) -> None:
        unit = self.state.unit
        if changed:
            raise ConflictError(
                f"{unit} changes one of its {what} (shape {tuple(changed[0].shape)}) in place, "
                "so its forward cannot be run again",
                remedy=f"Use `save`, `offload` or `remake` on {unit}. For inputs: plan the block around it instead, in "
                "which they are made again; or switch that off where it is an operation's inplace=True.",
            )

    def prepare(self) -> None:
        """The forward is about to run again: see that it would read what it read.

        Raises InPlaceError where a parameter or a hidden tensor was changed in place or a module exchanged since,
        ConflictError where the parameters are in pieces on several devices and cannot be gathered, or the forward is
        not over and has done by now what cannot be done twice.
        """
        unit = self.state.unit
        if not self._over:
            self._refuse_changed("inputs", self._inputs.changed() or self.hidden.changed())
            self._refuse_changed("parameters", self.parameters.changed())
        elif not self._structure.still_is():
            raise InPlaceError(
                f"modules or parameters of {unit} were exchanged or added between forward and backward, so its forward "
                "would run again on others",
                remedy=f"Change modules after backward, or use `save` or `offload` on {unit}.",
            )
        self.parameters.check(unit, "a parameter")
        self.hidden.check(unit, "a tensor among the arguments")
        if self._structure.without_memory():
            raise _in_pieces_error(unit)
        if self._is_in_pieces():
            # FSDP2 gathers them; its own backward, or the end of this one, lets them go again
            unshard: Any = getattr(self.module, "unshard", None)
            if unshard is not None:
                unshard()
            if self._is_in_pieces():
                raise _in_pieces_error(unit)

    def _is_in_pieces(self) -> bool:
        return any(map(_in_pieces, self.parameters.tensors, self._structure.parameters()))

    def _again(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        unit, inside = self.state.unit, inside_autocast()
        with (
            self.surroundings.restored(),
            running_again(unit),
            _without_its_hooks(),
            self.state.turn(),
            self._earlier_parameters(),
            self.reached.restored(),
            self._earlier_gradients(),
        ):
            elsewhere = (inside or self._outdated) and (self._block is None or autocast_block() != self._block)
            if self._outdated == "inputs" or (self._outdated and elsewhere):
                raise ConflictError(
                    f"{unit} computed with casts of {self._outdated} from before these were changed, as autocast "
                    "remembers them until its outermost block ends, and its forward would run again with new ones",
                    remedy="End the autocast block before the optimizer step, or call torch.clear_autocast_cache() "
                    f"after it: without a plan, too, such a forward does not see the new {self._outdated}.",
                )
            args, kwargs = put_together(self.template, iter(tensors))
            if self._caches:
                args, kwargs = with_caches(args, kwargs)
            try:
                # casts of its own are not for later forwards of a block that it only happens to run in
                with without_remembered_casts() if elsewhere else nullcontext():
                    return self.surroundings.run(call_inner, self.module, self.state, args, kwargs)
            except Enough:
                raise
            except Exception as error:
                if _stems_from_enough(error):
                    raise Enough from error
                raise

    @contextmanager
    def _earlier_parameters(self) -> Iterator[None]:
        """The unit has the parameters that its forward began with: ``functional_call`` has taken them away again."""
        now, places = self._structure.parameters(), self._structure.places
        with ExitStack() as stack:
            for (home, name), before, after in zip(places, self.parameters.tensors, now, strict=True):
                if holds_other_values(before, after):
                    stack.callback(home.__setitem__, name, after)
                    home[name] = before
            yield

    def takes_gradients(self) -> None:
        """Backward is or may be called inside of this forward: it adds to ``.grad``, which may be read there."""
        if not self._gradients:
            known = {id(t): t for t in (*self.parameters.tensors, *self.reached.tensors()) if t is not None}
            leaves = [t for t in known.values() if t.is_leaf]
            self._gradients = [(t, None if t.grad is None else t.grad.clone()) for t in leaves]

    @contextmanager
    def _earlier_gradients(self) -> Iterator[None]:
        """``.grad`` is what it was when the forward took its first gradient, and afterwards what it is now."""
        with ExitStack() as stack:
            for tensor, gradient in self._gradients:
                stack.enter_context(setting(tensor, "grad", None if gradient is None else gradient.clone()))
            yield


class _Versions:
    """Tensors that a recompute reads without autograd knowing, with their version counters."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.tensors = tensors
        self.versions = [0 if t is None else t._version for t in tensors]

    def changed(self) -> list[torch.Tensor]:
        """Those that were changed in place since."""
        pairs = zip(self.tensors, self.versions, strict=True)
        return [t for t, version in pairs if t is not None and t._version != version]

    def check(self, unit: str, what: str) -> None:
        """Raise InPlaceError where one was changed in place since."""
        for tensor in self.changed():
            raise InPlaceError(
                f"{what} of {unit} (shape {tuple(tensor.shape)}) needed for gradient computation has been modified by "
                "an inplace operation between forward and backward",
                remedy="Change it after backward: an optimizer step before the last backward of a graph does this.",
            )


_NONE = _Versions(())


def _stems_from_enough(error: BaseException) -> bool:
    """Whether code of the unit made an error of its own of the one by which a second run ends."""
    seen, rest = set[int](), [error]  # an error may be raised from itself
    while rest:
        one = rest.pop()
        if isinstance(one, Enough):
            return True
        if id(one) not in seen:
            seen.add(id(one))
            rest += [cause for cause in (one.__cause__, one.__context__) if cause is not None]
    return False


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a != a) & (b != b)).all())


def _in_pieces(before: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    """Whether FSDP2 (another type), or FullyShardedDataParallel with original parameters, has taken a whole apart."""
    if before is now:
        return False
    return (hasattr(now, "to_local") and not hasattr(before, "to_local")) or hasattr(now, "_fsdp_flattened")


def _in_pieces_error(unit: str) -> ConflictError:
    return ConflictError(
        f"the parameters of {unit} are sharded while it runs again in backward",
        remedy="Choose recompute or save for it, or keep parameters whole after forward (FullyShardedDataParallel: "
        "SHARD_GRAD_OP; fully_shard: reshard_after_forward=False, or shard a segment's units together).",
    )
