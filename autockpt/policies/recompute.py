"""recompute: keep a unit's inputs only and run its forward again in backward (Chen et al. 2016, arXiv:1604.06174)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from autockpt.checkpointing.frame import CheckpointFrame
from autockpt.policies.base import Attachment, PlannedUnit, Session, call_inner, inner_of, is_enabled
from autockpt.policies.compiling import claim, outside_graphs, skip_frames, traces_backward
from autockpt.policies.conflicts import refuse_by_message, refuse_modules
from autockpt.policies.saved_weights import keep_identity
from autockpt.policies.tiles import attach_tiles


@functools.cache
def pass_over_what_is_set_to_itself() -> None:
    """From now on, in all of the process. Registering a parametrization sets the weight to itself, which changes its
    version alone; PEFT's LoRA on parameters, as on experts, registers one in every forward."""
    maybe_set: Any = parametrize._maybe_set

    def pass_over(dest: torch.Tensor, src: torch.Tensor) -> None:
        if dest is not src:
            maybe_set(dest, src)

    parametrize._maybe_set = pass_over


class RecomputeState(Attachment):
    """A unit's attachment. ``frame`` makes what looks after one call; ``context_fn`` is that of PyTorch's selective
    checkpointing, inside a compiled graph."""

    has_check: ClassVar[bool] = True

    def __init__(
        self,
        unit: str,
        frame: Callable[..., CheckpointFrame] = CheckpointFrame,
        context_fn: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(unit)
        self.frame, self.context_fn = frame, context_fn
        pass_over_what_is_set_to_itself()
        keep_identity()


def attach_recompute(unit: PlannedUnit, session: Session) -> None:
    refuse_modules(unit.module, unit.name)
    if (tiles := unit.choice.tiles) > 1:  # type: ignore[union-attr]
        attach_tiles(unit, session, tiles)
    session.place(unit.module, run_recomputed, RecomputeState(unit.name))


def run_recomputed(module: nn.Module, state: RecomputeState, /, *args: Any, **kwargs: Any) -> Any:
    """The unit's forward; where gradients are enabled, what it saves is dropped and recomputed in backward.

    What looks after the call is the attachment's ``frame``; inside a compiled graph it is PyTorch's own checkpointing.
    Raises ConflictError where the forward cannot be run twice (inputs changed in place, some KV caches). In backward
    ConflictError where it does not do again what it did, InPlaceError where something that it read was changed since.
    """
    if not is_enabled(state):
        return call_inner(module, state, args, kwargs)
    if not torch.compiler.is_compiling():
        return run_in_frame(module, state, args, kwargs)
    if traces_backward():
        return recompute_in_graph(module, state, args, kwargs)
    return _recompute_between_graphs(module, state, args, kwargs)


def recompute_in_graph(module: nn.Module, state: RecomputeState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As part of a graph: a compiler takes no recompute but torch's own, and looks after random state itself.

    Where it cannot, as the unit's forward changes state or depends on values, it breaks the graph here and calls this
    for real. Torch's own would find changed state in its recomputation.
    """
    if torch.compiler.is_compiling():
        claim()
        inner = functools.partial(call_inner, module, state)
        # determinism_check only distinguishes, in the compiler's cache on disk, this graph from ones not mended
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True, "determinism_check": "default"}
        if state.context_fn is not None:
            options["context_fn"] = state.context_fn
        return checkpoint(inner, args, kwargs, **options)
    return run_in_frame(module, state, args, kwargs)


# Compiled as a part of others only: so a graph breaks before it, and what is called then is this and not torch's.
skip_frames(recompute_in_graph)


def run_in_frame(module: nn.Module, state: RecomputeState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The unit's forward, recomputed in backward. Errors as ``run_recomputed``."""
    frame = state.frame(state.current_unit(module), inner_of(module, state), args, kwargs, state.restored_set)
    try:
        return frame.run(args, kwargs)
    except (RuntimeError, AssertionError) as error:
        refuse_by_message(error, state.unit)
        raise


_recompute_between_graphs = outside_graphs(
    "recompute` or `selective", "would run again with other random numbers under this backend", inside=True
)(run_in_frame)

skip_frames(CheckpointFrame.pack, CheckpointFrame.unpack, CheckpointFrame.repack)
