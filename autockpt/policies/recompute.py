"""recompute: keep a unit's inputs only and run its forward again in backward (Chen et al. 2016, arXiv:1604.06174)."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autockpt.errors import ConflictError
from autockpt.policies.attachment import acts, call_inner, call_plainly
from autockpt.policies.base import PlannedUnit, Policy, PolicySession
from autockpt.policies.compiling import outside_graphs, run_as_it_is, traces_backward
from autockpt.policies.conflicts import refuse_modules, refuse_native
from autockpt.policies.joint_graph import claim, save_reads_of_what_changes
from autockpt.policies.kvcache import without_cache
from autockpt.policies.region import UnitCall
from autockpt.policies.replay import Replay, ReplayState
from autockpt.schema.choices import Choice


class RecomputePolicy(Policy):
    kind: ClassVar[str] = "recompute"

    def attach_to(self, unit: PlannedUnit, session: PolicySession) -> str:
        refuse_modules(unit.module, unit.name)
        session.place(unit.name, unit.module, run_recomputed, ReplayState(unit.name))
        return "recompute: its inputs are kept, its forward runs again in backward"

    def reruns(self, choice: Choice, forward: int) -> tuple[int, int]:
        # it stops as soon as all is there that backward needs: a last product, LoRA's beside it, need not run again
        return min(forward // 2, forward - 1) if forward else 0, forward


def run_recomputed(module: nn.Module, state: ReplayState, /, *args: Any, **kwargs: Any) -> Any:
    """The unit's forward; where gradients are enabled, what it saves is dropped and made again in backward.

    Raises ConflictError where the forward cannot be run twice (inputs changed in place, some KV caches). In backward
    ConflictError where it does not do again what it did, InPlaceError where something that it read was changed since.
    """
    if not acts(state):
        return call_plainly(module, state, args, kwargs)
    if not torch.compiler.is_compiling():
        return run_twice(module, state, args, kwargs)
    if traces_backward():
        return _recompute_in_graph(module, state, args, kwargs)
    return _recompute_between_graphs(module, state, args, kwargs)


def _recompute_in_graph(module: nn.Module, state: ReplayState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As part of a graph: a compiler takes no recompute but torch's own, and looks after random state itself.

    Where it cannot, as the unit's forward changes state or goes by values, it breaks the graph here and calls this for
    real. Torch's own would find changed state in its second run.
    """
    if torch.compiler.is_compiling():
        _claim()
        inner = functools.partial(_inside_graph, module, state)
        # determinism_check only tells the compiler's cache on disk this graph from others', which nobody put right
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True, "determinism_check": "default"}
        return checkpoint(inner, args, kwargs, **options)
    return run_twice(module, state, args, kwargs)


# Compiled as a part of others only: so a graph breaks before it, and what is called then is this and not torch's.
run_as_it_is(_recompute_in_graph)


def _claim() -> None:
    """Runs while the compiler traces a unit."""
    claim("changed inputs", save_reads_of_what_changes)


# What torch.compiler.assume_constant_result does: calling that imports the compiler, which takes a second.
_claim._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _inside_graph(module: nn.Module, state: ReplayState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.compiler.is_compiling():
        raise ConflictError(
            f"{state.unit} cannot be part of a graph under `recompute`: the compiler breaks the graph inside of it",
            remedy="Choose save or offload for it, or leave torch._dynamo.config.nested_graph_breaks off.",
        )
    return call_inner(module, state, args, kwargs)


def run_twice(
    module: nn.Module, state: ReplayState, args: tuple[Any, ...], kwargs: dict[str, Any], make: type[Replay] = Replay
) -> Any:
    """The unit's forward, and in backward once more; ``make`` is the replay that does both. Errors as ``recompute``."""
    refuse_native(module, state.unit)
    args, kwargs = without_cache(module, state.unit, args, kwargs)
    return UnitCall(make(module, state, args, kwargs)).run()


_recompute_between_graphs = outside_graphs(
    "recompute", "would run again with other random numbers under this backend", inside=True
)(run_twice)
