"""selective, keep_attention: recompute a unit's forward in backward, but keep outputs that are expensive to compute.

Selective activation recomputation (Korthikanti et al. 2022, arXiv:2205.05198), by modules, so that a plan is readable.
Outputs of whole modules (linear layers, convolutions) and of attention functions are kept. Where a module multiplies by
weights of its own in some other way (experts, ``nn.MultiheadAttention``), outputs of the functions that it calls are.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx.traceback import get_current_meta
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autockpt.checkpointing.kept_outputs import FunctionScopes, KeepingFrame, Scope, frame_of
from autockpt.checkpointing.op_table import is_attention, is_heavy
from autockpt.errors import PlanError
from autockpt.policies.base import Attachment, PlannedUnit, Session, call_inner, inner_of, modules_named, take_off
from autockpt.policies.compiling import skip_frames
from autockpt.policies.conflicts import refuse_modules
from autockpt.policies.recompute import RecomputeState, run_recomputed
from autockpt.schema.choices import ATTENTION, EVERYTHING, Selective

_T = torch.Tensor
_GROUPED = [found for name in ("_grouped_mm", "grouped_mm") for o in (torch, F) if (found := getattr(o, name, None))]
_OF_TENSORS = [_T.matmul, _T.__matmul__, _T.bmm, _T.mm]
PRODUCTS = frozenset(
    [F.linear, torch.addmm, torch.baddbmm, torch.bmm, torch.einsum, torch.matmul, torch.mm, *_OF_TENSORS, *_GROUPED]
)


@functools.cache
def _context_fn(keep: tuple[str, ...]) -> Callable[[], Any]:
    """For PyTorch's checkpoint while the compiler traces a unit. One object for all units that keep the same: the
    compiler guards on it, and would compile each layer again."""
    return functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy_in_graph, keep))


def _policy_in_graph(keep: tuple[str, ...], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save fused attention, and matrix products inside of the modules to keep."""
    if EVERYTHING in keep:
        kept = is_heavy(op) or is_attention(op)
    elif is_attention(op):
        kept = ATTENTION in keep
    else:
        kept = is_heavy(op) and any(path.endswith(f".{name}") for path in _modules_around() for name in keep)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _modules_around() -> list[str]:
    """Paths of the modules that the compiler's node stands in, which it runs at present.

    It writes down how Python comes to each: by the forward that is placed on a module, by ``_modules`` or an index.
    """
    stack = get_current_meta().get("nn_module_stack") or {}
    return [_INDEX.sub(r".\1", _PLACED.sub("", path)) for path, _ in stack.values()]


_PLACED, _INDEX = re.compile(r"(\.forward)?\.args\[0\]|\._modules\b"), re.compile(r"\['?(\w+)'?\]")


class ScopeState(Attachment):
    """The attachment of a module inside a unit whose output is kept, or outputs of functions that it calls."""

    def __init__(self, unit: str, module: nn.Module, functions: frozenset[Any] | None) -> None:
        super().__init__(unit)
        self.uncompiled = type(module).__module__.startswith("torch.")
        self.scope = Scope(functions)


class _CompiledInPlace:
    """Takes the scopes off a unit that is compiled in place. In its graph they do nothing, and the compiler would guard
    on each, so compile every layer again. ``placed``: what the session placed, these ``scopes`` among it."""

    def __init__(self, unit: nn.Module, placed: list[Any], scopes: list[Any]) -> None:
        self._unit, self._placed, self._scopes = unit, placed, scopes

    def begin(self) -> None:
        """A forward of the model begins."""
        if self._scopes and not torch.compiler.is_compiling() and self._unit._compiled_call_impl is not None:
            for module, forward in self._scopes:
                if module.__dict__.get("forward") is forward:  # else what runs again stands before it
                    self._placed.remove((module, forward))
                    take_off(module, forward)
            self._scopes = []

    def end(self) -> None:
        """It has ended."""


def run_scope(module: nn.Module, state: ScopeState, /, *args: Any, **kwargs: Any) -> Any:
    """The module's forward, unless what it returned was kept; or with the outputs of functions that it calls kept."""
    if torch.compiler.is_dynamo_compiling() or not state.active or (frame := frame_of(state.unit)) is None:
        return call_inner(module, state, args, kwargs)
    if state.scope.functions is None:
        return frame.call(state.scope, module, inner_of(module, state), args, kwargs)
    if (mode := frame.function_mode(state.scope)) is None:
        return call_inner(module, state, args, kwargs)
    with mode:
        return call_inner(module, state, args, kwargs)


skip_frames(FunctionScopes.__torch_function__)


def attach_selective(unit: PlannedUnit, session: Session) -> None:
    """``selective``: products of the named modules, or of the whole unit, are not run again.

    And ``keep_attention``, which keeps the outputs of fused attention alone.
    """
    refuse_modules(unit.module, unit.name)
    choice = unit.choice
    keep, within = (choice.keep, choice.within) if isinstance(choice, Selective) else ((ATTENTION,), ())
    # what runs again, each by itself, by its name inside the unit: "" is the unit
    regions = modules_named(unit, within, "that could run again") if within else {"": unit.module}
    # first the scopes: what runs again may itself be one, inside of what recomputes it
    before = len(session.placed)
    for module, functions in _scopes(unit, keep, regions).items():
        session.place(module, run_scope, ScopeState(unit.name, module, functions))
    session.listeners.append(_CompiledInPlace(unit.module, session.placed, session.placed[before:]))
    for module in regions.values():
        session.place(module, run_recomputed, RecomputeState(unit.name, KeepingFrame, _context_fn(keep)))


_Scopes = dict[nn.Module, frozenset[Any] | None]
"""By module the functions, besides attention, whose outputs are kept where it calls them; None: its own output is."""


def product_modules(module: nn.Module) -> _Scopes:
    """The modules in a module, itself included, that multiply by weights of their own."""
    found: _Scopes = {}
    for inner in module.modules():
        if isinstance(inner, _LAYERS) or type(inner).__name__ == "Conv1D":  # of transformers
            found[inner] = None
        elif isinstance(inner, _NO_PRODUCTS) or "norm" in type(inner).__name__.lower():
            continue
        elif any(p is not None and p.dim() >= 2 for p in inner._parameters.values()) or "parametrizations" in (
            inner._modules
        ):
            found[inner] = PRODUCTS
    return found


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, nn.Bilinear, *_CONVOLUTIONS)
_NO_PRODUCTS = (nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase, nn.ParameterList, nn.ParameterDict)


def _scopes(unit: PlannedUnit, keep: tuple[str, ...], regions: Mapping[str, nn.Module]) -> _Scopes:
    """Modules to put scopes on, the regions themselves among them."""
    found: _Scopes = {}
    if ATTENTION in keep:
        found |= {inner: frozenset() for region in regions.values() for inner in _attentions(region)}
    for module in _named(unit, keep, regions):
        if any(True for _ in module.children()):
            found |= dict.fromkeys(_attentions(module), frozenset())
        found |= product_modules(module)
    return found


def _named(unit: PlannedUnit, keep: tuple[str, ...], regions: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    if EVERYTHING in keep:
        yield from regions.values()
        return
    for name in keep:
        if name == ATTENTION:
            continue
        module = modules_named(unit, [name], "whose output could be kept", called=False)[name]
        if not any(not region or name == region or name.startswith(f"{region}.") for region in regions):
            raise PlanError(
                f"{unit.name} is to keep the output of {name}, which does not run again",
                remedy=f"Leave it out of `keep`, or name a module around it in `within`: {', '.join(regions)}.",
            )
        yield module


def _attentions(region: nn.Module) -> list[nn.Module]:
    """The outermost modules inside a region that are attentions by their class's name; the whole region without any."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in region.modules():
        if module is region or id(module) in inside:
            continue
        name = type(module).__name__.lower()
        if "attention" in name or "attn" in name:
            found.append(module)
            inside.update(map(id, module.modules()))
    return found or [region]
