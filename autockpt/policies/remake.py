"""remake: what a unit saves is made again tensor by tensor in backward, by the ops that made it and from what is kept.

Beside ``recompute`` and ``selective``, whose units run again as a whole: only what leads to a saved tensor runs, when
it is needed, and nothing of the unit's Python. With ``keep: ["**"]`` only what is cheap is made again, such as an MLP's
activation function and product, and norms (fused by hand: Megatron-LM, arXiv:2205.05198; by a compiler's partitioner:
torch._functorch.partitioners).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from autockpt.checkpointing.divergence import numbered
from autockpt.errors import ConflictError
from autockpt.policies.arguments import tensors_of
from autockpt.policies.assigned import saving
from autockpt.policies.attachment import Attachment, acts, call_inner, call_plainly
from autockpt.policies.base import PlannedUnit, Policy, PolicySession, modules_named, setting
from autockpt.policies.compiling import outside_graphs
from autockpt.policies.conflicts import refuse_modules, refuse_native, sequence_nr
from autockpt.policies.following import Following, RecordedCalls
from autockpt.policies.op_recorder import HandingOut, Tape, current, running, tape_of
from autockpt.policies.rerun_state.reach import code_of
from autockpt.policies.rerun_state.surroundings import user_dispatch_modes
from autockpt.policies.score import Learning
from autockpt.policies.watched_backends import refuse_changed
from autockpt.schema.choices import ATTENTION, EVERYTHING, Choice, Remake

_PYTHON_NODE = torch.autograd.function.BackwardCFunction


class RemakeState(Attachment):
    """A unit's attachment. ``keep`` as in the choice; ``everywhere``: all its ops are noted."""

    has_check: ClassVar[bool] = True

    def __init__(self, unit: str, keep: Sequence[str], *, everywhere: bool) -> None:
        super().__init__(unit)
        self.keep = tuple(keep)
        self.everywhere = everywhere
        self._cache_calls: RecordedCalls | None = None

    def calls(self, module: nn.Module) -> RecordedCalls:
        """What the unit's calls so far have taught."""
        if self._cache_calls is None:
            self._cache_calls = RecordedCalls(code_of(self.unit, module))
        return self._cache_calls


class PartState(Attachment):
    """A module inside: its products are kept (``keeps``), or its ops are noted."""

    def __init__(self, unit: str, *, keeps: bool) -> None:
        super().__init__(unit)
        self.keeps = keeps


@outside_graphs("remake", "makes single tensors again, which a compiled graph no longer shows", inside=True)
def run_remade(module: nn.Module, state: RemakeState, /, *args: Any, **kwargs: Any) -> Any:
    """The unit's forward; where gradients are enabled, what it saves is dropped where it can be made again.

    Raises ConflictError where a custom autograd function runs in it, or it may switch denormal numbers off. In backward
    InPlaceError where something that it read was changed since, ConflictError where an op does something else than it
    did.
    """
    if not acts(state):
        return call_plainly(module, state, args, kwargs)
    refuse_native(module, state.unit)
    refuse_changed(module, state, args, kwargs)
    calls, before = state.calls(module), sequence_nr()
    if calls.code.flushes_denormals:
        raise ConflictError(
            f"{state.unit} calls torch.set_flush_denormal, and under which setting each of its ops ran cannot be asked",
            remedy=f"Call it before training begins, or use `recompute`, `save` or `offload` on {state.unit}.",
        )
    output, path = _watched(module, state, calls, args, kwargs)
    way = (sequence_nr() - before, *path) if path is not None else None
    if way is None or way not in calls.checked:
        _refuse_custom_functions(output, before, state.unit)
        calls.checked.add(way)
    return output


def _watched(
    module: nn.Module, state: RemakeState, calls: RecordedCalls, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[int, int] | None]:
    """Run the forward: along an earlier call's tape, or with one of its own. With what tells its way from others; None
    where it left the earlier one."""
    tensors = tensors_of((args, kwargs))
    outside, key = calls.given(module, tensors) if state.everywhere else (tensors, None)
    score = calls.scores.get(key)
    observer, code = None, calls.code
    if state.check is not None:
        # what later calls go by is proven first; and what a mode does with ops when they run again, each time
        new = (key is not None and key not in calls.scores) or bool(user_dispatch_modes())
        observer = state.check.observer(checked=True if new else None)
    look_at = numbered(observer)
    if score is not None:
        following = Following(state.unit, score, outside, look_at)
        with saving(state.unit, following.pack, observer, assigns=code.assigns), following:
            output = call_inner(module, state, args, kwargs)
        if following.lost:
            calls.missed(key)
        return output, None if following.lost else (score.noted, following.packed)
    tape = Tape(state.unit, tensors, state.keep, look_at)
    learning = Learning(tape, outside) if key is not None else None
    noting = running(tape) if state.everywhere else nullcontext()
    handing = HandingOut(tape, data=not state.everywhere) if code.writes_unseen else nullcontext()
    hooks = saving(state.unit, tape.pack, observer, assigns=code.assigns)
    with current(tape), hooks, noting, learning or nullcontext(), handing:
        output = call_inner(module, state, args, kwargs)
    if learning is not None:
        calls.learn(key, learning.score())
    path = tape.path
    tape.forget()
    return output, path


def run_part(module: nn.Module, state: PartState, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module inside a unit whose tape may be running."""
    tape = tape_of(state.unit) if state.active and not torch.compiler.is_compiling() else None
    if tape is None:
        return call_inner(module, state, args, kwargs)
    with setting(tape, "keeping", True) if state.keeps else running(tape):
        return call_inner(module, state, args, kwargs)


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
                f"{unit} runs {made_by.__name__}, a custom autograd function, so what it saves cannot be made again op "
                "by op",
                remedy="Use `recompute`, `selective`, `save` or `offload` for it.",
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen and following._sequence_nr() >= since:
                seen.add(following)
                open_ends.append(following)


def _reads_only(function: type) -> bool:
    """Whether a custom autograd function is known to write to no memory but its result's.

    bitsandbytes' product with 4 bits is: its one operator is on the tape, and it saves the packed weight alone.
    """
    return function.__module__.startswith("torch.") or (
        function.__module__ == "bitsandbytes.autograd._functions" and function.__name__ == "MatMul4Bit"
    )


class RemakePolicy(Policy):
    """Carries out ``remake``."""

    kind: ClassVar[str] = "remake"

    def attach_to(self, unit: PlannedUnit, session: PolicySession) -> str:
        choice = unit.choice
        assert isinstance(choice, Remake)
        refuse_modules(unit.module, unit.name, torch.jit.ScriptModule)
        for module in modules_named(unit, choice.within, "whose tensors could be made again").values():
            session.place(unit.name, module, run_part, PartState(unit.name, keeps=False))
        keep = [] if EVERYTHING in choice.keep else [name for name in choice.keep if name != ATTENTION]
        for module in modules_named(unit, keep, "whose output could be kept").values():
            session.place(unit.name, module, run_part, PartState(unit.name, keeps=True))
        state = RemakeState(unit.name, choice.keep, everywhere=not choice.within)
        session.place(unit.name, unit.module, run_remade, state)
        kept = "matrix products and attention" if EVERYTHING in choice.keep else ", ".join(choice.keep)
        where = f" of {', '.join(choice.within)}" if choice.within else ""
        besides = f", products of {kept} are kept" if kept else ""
        return f"remake: tensors{where} are made again one by one in backward{besides}"

    def reruns(self, choice: Choice, forward: int) -> tuple[int, int]:
        assert isinstance(choice, Remake)
        return 0, 0 if EVERYTHING in choice.keep else forward
