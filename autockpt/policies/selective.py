"""selective, keep_attention: run a unit's forward again in backward, but keep the outputs that are dear to make.

Selective activation recomputation (Korthikanti et al. 2022, arXiv:2205.05198), by modules: what stays in the plan is
readable, and only the named modules pay for being watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from torch import nn

from autockpt.errors import PlanError
from autockpt.policies.attachment import acts, call_plainly
from autockpt.policies.base import PlannedUnit, Policy, PolicySession, modules_named
from autockpt.policies.compiling import outside_graphs
from autockpt.policies.conflicts import refuse_modules, refuse_native
from autockpt.policies.kvcache import without_cache
from autockpt.policies.region import UnitCall
from autockpt.policies.replay import ReplayState
from autockpt.policies.saved_outputs import KeepingReplay, ScopeState, run_scope
from autockpt.policies.watched_backends import refuse_changed
from autockpt.schema.choices import ATTENTION, EVERYTHING, Choice, KeepAttention, Remake, Selective

WHY = "keeps the outputs of single ops, which a compiled graph no longer shows"


@outside_graphs("selective", WHY, inside=True)
def run_selective(module: nn.Module, state: ReplayState, /, *args: Any, **kwargs: Any) -> Any:
    """The unit's forward; in backward it runs again without the ops whose outputs were kept.

    An output that is changed in place cannot be kept: its op runs again like the rest. Raises what ``recompute``
    raises.
    """
    if not acts(state):
        return call_plainly(module, state, args, kwargs)
    refuse_changed(module, state, args, kwargs)
    refuse_native(module, state.unit)
    args, kwargs = without_cache(module, state.unit, args, kwargs)
    return UnitCall(KeepingReplay(module, state, args, kwargs)).run()


@outside_graphs("keep_attention", WHY, inside=True)
def run_keep_attention(module: nn.Module, state: ReplayState, /, *args: Any, **kwargs: Any) -> Any:
    """As ``run_selective``."""
    return run_selective(module, state, *args, **kwargs)


class SelectivePolicy(Policy):
    """Carries out ``selective``: heavy ops of the named modules, or of the whole unit, are not run again."""

    kind: ClassVar[str] = "selective"
    run: ClassVar[Callable[..., Any]] = staticmethod(run_selective)

    def attach_to(self, unit: PlannedUnit, session: PolicySession) -> str:
        refuse_modules(unit.module, unit.name)
        keep, within = kept_by(unit.choice), unit.choice.within if isinstance(unit.choice, Selective) else ()
        # what runs again, each by itself, by its name inside the unit: "" is the unit
        regions = modules_named(unit, within, "that could run again") if within else {"": unit.module}
        # first the scopes: what runs again may itself be one, inside of what recomputes it
        for module, attention in _scopes(unit, keep, regions):
            session.place(unit.name, module, run_scope, ScopeState(unit.name, attention=attention))
        for module in regions.values():
            session.place(unit.name, module, self.run, ReplayState(unit.name))
        again = ", ".join(filter(None, regions)) or "its forward"
        kept = "matrix products and attention" if EVERYTHING in keep else ", ".join(keep) or "nothing"
        return f"{self.kind}: {again} run{'s' * (len(regions) == 1)} again in backward, outputs of {kept} are kept"

    def reruns(self, choice: Choice, forward: int) -> tuple[int, int]:
        return 0, forward  # what draws random numbers runs again, whatever is to be kept


class KeepAttentionPolicy(SelectivePolicy):
    """Carries out ``keep_attention``: fused attention recomputes inside itself already, so it is not run twice."""

    kind: ClassVar[str] = "keep_attention"
    run: ClassVar[Callable[..., Any]] = staticmethod(run_keep_attention)

    def reruns(self, choice: Choice, forward: int) -> tuple[int, int]:
        # beside every fused attention there are projections, which do run again
        return min(forward // 3, forward - 1) if forward else 0, forward


def kept_by(choice: Choice) -> tuple[str, ...]:
    """What a choice keeps the outputs of, beside a unit's inputs: modules of the unit, fused attention, everything."""
    if isinstance(choice, KeepAttention):
        return (ATTENTION,)
    return choice.keep if isinstance(choice, Selective | Remake) else ()


def _scopes(unit: PlannedUnit, keep: Sequence[str], regions: dict[str, nn.Module]) -> Iterator[tuple[nn.Module, bool]]:
    """Modules to watch, the regions themselves among them, and whether for fused attention alone."""
    if EVERYTHING in keep:
        yield from ((module, False) for module in regions.values())
        return
    for name in keep:
        if name == ATTENTION:
            yield from ((inner, True) for module in regions.values() for inner in _attentions(module))
            continue
        module = modules_named(unit, [name], "whose output could be kept", called=False)[name]
        if not any(not region or name == region or name.startswith(f"{region}.") for region in regions):
            raise PlanError(
                f"{unit.name} is to keep the output of {name}, which does not run again",
                remedy=f"Leave it out of `keep`, or name a module around it in `within`: {', '.join(regions)}.",
            )
        yield module, False


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
