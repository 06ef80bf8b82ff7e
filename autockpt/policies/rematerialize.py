"""remake: single saved tensors of a unit are recomputed in backward, by the ops that made them, from what is kept.

Unlike under ``recompute`` and ``selective``, none of the unit's Python runs again. Only the ops that lead to a saved
tensor do, when it is needed (``checkpointing.recipes``). With ``keep: ["**"]`` only what is cheap is recomputed: an
MLP's activation function and product, norms (fused by hand: Megatron-LM, arXiv:2205.05198; by a compiler's partitioner:
torch._functorch.partitioners).
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.checkpointing.arguments import tensors_of
from autockpt.checkpointing.op_recorder import OpRecorder
from autockpt.checkpointing.op_table import Overload, is_attention, kind_of
from autockpt.checkpointing.recorded_call import RecordedCall, RecordedUnit
from autockpt.checkpointing.replay_context import autocast_depth, sequence_nr
from autockpt.errors import ConflictError
from autockpt.interpreter import patched
from autockpt.policies.base import Attachment, PlannedUnit, Session, call_inner, inner_of, is_enabled, modules_named
from autockpt.policies.compiling import compiled_by, outside_graphs, skip_frames
from autockpt.policies.conflicts import refuse_by_message, refuse_modules
from autockpt.policies.saved_weights import keep_identity
from autockpt.schema.choices import ATTENTION, EVERYTHING, Remake


def _overloads(*names: str) -> frozenset[Any]:
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    return frozenset(getattr(p, overload) for p in packets if p is not None for overload in p.overloads())


# Of complex numbers: a conjugate that they take inside is not applied (pytorch#198118, open as of torch 2.15).
_OF_COMPLEX = _overloads("linalg_pinv", "linalg_polar", "linalg_matrix_sqrth")
# Under autocast: the matrix products inside of their kernels are cast only where no mode is.
_UNDER_AUTOCAST = _overloads("_sparse_addmm", "_trilinear")


class RecordingMode(TorchDispatchMode):
    """Hands the ops of ``unit`` to a recorder. Raises ConflictError for those that would give something else."""

    supports_higher_order_operators = True  # to refuse them

    def __init__(self, unit: str, recorder: OpRecorder) -> None:
        super().__init__()
        self._unit, self._recorder = unit, recorder

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if raised[0] is not None and (compiler := sys.modules.get("torch._dynamo")) is not None:
            compiler.reset()  # it never compiles what it first met under a mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # not wrapped by torch, which costs more than looking at an op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with compiled_by(None) as compiler:  # else it would take on what is called here
            if compiler or self._is_changed(func, args):
                what = "compiled code (torch.compile)" if compiler else str(func)
                raise ConflictError(
                    f"{self._unit} calls {what}, which computes something else where ops are watched",
                    remedy=f"Use recompute, selective, offload or save on {self._unit}, or name modules that do not "
                    "call it in `within`.",
                )
            out = self._recorder.run(func, args, kwargs or {})
            # Inside a dispatch mode writes over lists do not count as changes in place (torch 2.13), which autograd and
            # all who look for changes depend on.
            if kind_of(func) == "writes" and func._schema.name.startswith("aten::_foreach_"):
                torch.autograd.graph.increment_version([tensor for tensor in args[0] if not tensor.is_inference()])
            return out

    def _is_changed(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether an op would give something else here."""
        if not isinstance(func, Overload):  # torch.cond and the like, whose functions would not be compiled
            return True
        if func in _UNDER_AUTOCAST:
            return autocast_depth() > 0  # inside a dispatch mode autocast says that it is off
        return func in _OF_COMPLEX and args[0].is_complex()


skip_frames(RecordingMode.__torch_dispatch__, calls=False)
_PYTHON_NODE = torch.autograd.function.BackwardCFunction


class Learned:
    """What was learned from calls of units, by name and choice; None outside of ``recipes_known``."""

    units: ClassVar[dict[Any, RecordedUnit] | None] = None


def recipes_known(known: dict[Any, RecordedUnit]) -> AbstractContextManager[None]:
    """Go by ``known`` inside, and add to it what is learned: for plans that are traced one after the other. One
    recording of each unit is enough, and none is compared with a later one."""
    return patched(Learned, "units", known)


class RemakeState(Attachment):
    """A unit's attachment, with what was learned from its calls."""

    has_check: ClassVar[bool] = True

    def __init__(self, unit: str, choice: Remake) -> None:
        super().__init__(unit)
        keep_identity()
        self._choice = choice

    def new_unit(self, module: nn.Module) -> RecordedUnit:
        """See ``Attachment``."""
        known, key = Learned.units, (self.unit, self._choice)
        if known is not None and key in known:
            return known[key]
        named, mode = _named_modules(PlannedUnit(self.unit, module, self._choice)), partial(RecordingMode, self.unit)
        unit = RecordedUnit(self.unit, module, self.check, mode, self._keeps, named, compares=known is None)
        if known is not None:
            known[key] = unit
        return unit

    def _keeps(self, func: Any) -> bool:
        keep = self._choice.keep
        return EVERYTHING in keep or (ATTENTION in keep and is_attention(func))


def _named_modules(unit: PlannedUnit) -> dict[nn.Module, str]:
    """The modules inside of a unit that its choice names, and by which field. Raises PlanError."""
    choice = unit.choice
    assert isinstance(choice, Remake)
    keep = [] if EVERYTHING in choice.keep else [name for name in choice.keep if name != ATTENTION]
    within = modules_named(unit, choice.within, "whose tensors could be rematerialized")
    kept = modules_named(unit, keep, "whose output could be kept")
    return dict.fromkeys(within.values(), "within") | dict.fromkeys(kept.values(), "keep")


@outside_graphs("remake", "rematerializes single tensors, which a compiled graph no longer shows", inside=True)
def run_rematerialized(module: nn.Module, state: RemakeState, /, *args: Any, **kwargs: Any) -> Any:
    """The unit's forward; where gradients are enabled, what it saves is dropped where it can be recomputed.

    Raises ConflictError where a custom autograd function runs in it, and RerunMismatch where it shows that backwards
    of earlier calls were wrong. In backward InPlaceError where something that it read was changed since.
    """
    if not is_enabled(state):
        return call_inner(module, state, args, kwargs)
    call = RecordedCall(state.current_unit(module), args, kwargs)
    before = sequence_nr()
    try:
        output = call.run(inner_of(module, state), args, kwargs)
    except (RuntimeError, AssertionError) as error:
        refuse_by_message(error, state.unit)
        raise
    if call.is_recorded:
        _refuse_custom_functions(output, before, state.unit)
    return output


skip_frames(RecordedCall.pack, RecordedCall.hold, RecordedCall.unpack)


def _refuse_custom_functions(output: Any, since: int, unit: str) -> None:
    """A custom autograd function may write to memory without anybody noticing, as Triton kernels do.

    Those of PyTorch itself do not.
    """
    open_ends = [t.grad_fn for t in tensors_of(output) if t.grad_fn is not None]
    seen = set(open_ends)
    while open_ends:
        node = open_ends.pop()
        if isinstance(node, _PYTHON_NODE) and not _reads_only(made_by := type(node)._forward_cls):  # type: ignore[attr-defined]
            raise ConflictError(
                f"{unit} runs {made_by.__name__}, a custom autograd function, so what it saves cannot be "
                "rematerialized op by op",
                remedy="Use `recompute`, `selective`, `save` or `offload` for it.",
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen and following._sequence_nr() >= since:
                seen.add(following)
                open_ends.append(following)


def _reads_only(function: type) -> bool:
    """Whether a custom autograd function is known to write to no memory but its result's.

    bitsandbytes' product with 4 bits is: its one operator is on the tape, and it saves the packed weight alone. What
    torch.compile made of a function (CompiledFunction) is not: its kernels are no ops.
    """
    module, name = function.__module__, function.__name__
    of_torch = module.startswith("torch.") and name != "CompiledFunction"
    return of_torch or (module == "bitsandbytes.autograd._functions" and name == "MatMul4Bit")


def attach_remake(unit: PlannedUnit, session: Session) -> None:
    assert isinstance(unit.choice, Remake)
    refuse_modules(unit.module, unit.name, torch.jit.ScriptModule)
    _named_modules(unit)
    session.place(unit.module, run_rematerialized, RemakeState(unit.name, unit.choice))
