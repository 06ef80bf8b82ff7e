"""Choices attached to a live model: what sits where, and how it comes off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from autockpt.checkpointing.divergence import DivergenceCheck, Mode
from autockpt.devices.transport import OffloadTransports, Transports
from autockpt.errors import ConflictError, PlanError
from autockpt.policies import POLICIES
from autockpt.policies.attachment import AttachedForward, Attachment, attached_to, place, put_back, take_off
from autockpt.policies.base import ForwardListener, PlannedUnit
from autockpt.policies.conflicts import refuse_lazy, refuse_native, refuse_wrappers
from autockpt.runtime.check_report import Proof, proof, sentinels_of
from autockpt.runtime.model_forward import CacheState, GuardState, cache_owners, run_guarded, run_without_cache
from autockpt.schema.choices import Choice
from autockpt.schema.names import check_nesting, fold
from autockpt.workload.units import discover_units, modules_of, unwrap


@dataclass(eq=False, repr=False)
class Session:
    """Choices attached to a model, until ``remove``. Also a context manager.

    ``attached`` says for every unit in words what was really attached.
    """

    order: Sequence[PlannedUnit]
    transports: Transports
    sentinels: DivergenceCheck = field(default_factory=DivergenceCheck)
    attached: dict[str, str] = field(default_factory=dict)
    listeners: list[ForwardListener] = field(default_factory=list)
    _placed: list[tuple[nn.Module, AttachedForward]] = field(default_factory=list)

    def place(self, name: str, module: nn.Module, run: Callable[..., Any], state: Attachment) -> None:
        """Make ``run(module, state, *args, **kwargs)`` the module's forward until the session is removed."""
        if state.has_check:
            state.check = self.sentinels.unit(name)
        self._placed.append((module, place(module, run, state)))

    @property
    def host_bytes(self) -> int:
        """Most bytes that offloading claimed on the host so far; 0 where the caller chose another way off."""
        return self.transports.use.peak if isinstance(self.transports, OffloadTransports) else 0

    def describe(self, indent: str = "  ") -> Iterator[str]:
        """What is attached, in lines."""
        folded = fold(self.attached)
        width = max(map(len, folded), default=0)
        return (f"{indent}{name:<{width}}  {words}" for name, words in folded.items())

    def proof(self) -> Proof:
        """What sentinels have checked so far."""
        watched = {unit.name for unit in self.sentinels.units}
        idle = (unit for unit in self.order if unit.choice.kind != "save" and unit.name not in watched)
        return proof(self.sentinels, ((unit.name, f"no sentinel knows {unit.choice.kind}") for unit in idle))

    def in_mid_training(self) -> None:
        """Go on after one step as after many, which take less time: for steps that are measured.

        What is looked at closely in a unit's first calls is looked at in the next one alone, and no sentinel checks
        those calls.
        """
        self.sentinels.in_mid_training()
        for _, forward in self._placed:
            forward.state.in_mid_training()

    def guard(self) -> GuardState | None:
        """The attachment that looks after the whole model; None where nothing was attached."""
        states = (forward.state for _, forward in self._placed)
        return next((state for state in states if isinstance(state, GuardState)), None)

    def remove(self) -> None:
        """Take everything off again; the model is as it was. Idempotent.

        Graphs of forwards that have run already keep working.
        """
        while self._placed:
            take_off(*self._placed.pop())

    def take_turns(self, turn: Callable[[], AbstractContextManager[None]]) -> None:
        """Let ``turn`` be around whatever of this session runs again in backward."""
        for _, forward in self._placed:
            forward.state._cache_turn = turn

    def set_aside(self) -> None:
        """As ``remove``, but to be put back."""
        for module, forward in reversed(self._placed):
            take_off(module, forward)

    def put_back(self) -> None:
        """Attach again what was set aside, the very same objects: a compiler finds the code that it made for them.

        Raises ConflictError where something else is attached now.
        """
        try:
            for module, forward in self._placed:
                put_back(module, forward)
        except ConflictError:
            self.set_aside()
            raise

    @contextmanager
    def for_now(self) -> Iterator[Session]:
        """Put back while the block runs, then set aside again. Raises as ``put_back``."""
        self.put_back()
        try:
            yield self
        finally:
            self.set_aside()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()


def attach(
    model: nn.Module,
    choices: Mapping[str, Choice],
    *,
    transport: Transports | None = None,
    host_budget: int | None = None,
    sentinels: Mode | None = None,
) -> Session:
    """Attach choices to a live model.

    ``choices`` are by exact unit name, in order of execution, free of wrapper prefixes (PEFT, compile, DDP, Lightning);
    units that are not named save. ``transport`` gives what replaces the device's own for offload, by device and tier;
    those claim no more than ``host_budget`` bytes of host memory, and a forward that would need more raises
    HostBudgetExceeded. ``sentinels`` say how often what runs again or comes back is checked (None: as the environment
    says). From here on the choices act whenever gradients are enabled, in ``eval()`` too. Where every choice is
    ``save`` nothing at all is attached.

    Raises PlanError for a name that the model does not have and for a choice inside another; ConflictError where a plan
    is attached already, the model's own activation checkpointing is on, or a choice cannot be made safe. The model is
    then as it was.
    """
    transports = OffloadTransports(host_budget) if transport is None else transport
    session = attach_units(model, choices, transports, sentinels_of(sentinels))
    try:
        if session._placed:
            look_after(model, session)
    except BaseException:
        session.remove()
        raise
    return session


def attach_units(
    model: nn.Module, choices: Mapping[str, Choice], transports: Transports, sentinels: DivergenceCheck
) -> Session:
    """Attach choices to units as ``attach`` does; whoever calls this looks after the model as a whole."""
    check_nesting(choices)
    modules = modules_of(model, list(choices))
    units = [PlannedUnit(n, unwrap(m), choice) for (n, choice), m in zip(choices.items(), modules, strict=True)]
    _check_free(model, units)
    session = Session(units, transports, sentinels)
    try:
        for kind, policy in POLICIES.items():
            policy.attach([unit for unit in units if unit.choice.kind == kind], session)
        session.attached = {unit.name: session.attached[unit.name] for unit in units}
        if session.sentinels.units:
            session.listeners.append(session.sentinels)
    except BaseException:
        session.remove()
        raise
    return session


def without_kv_cache(model: nn.Module) -> Session:
    """What a plan does to the model beside its choices, and nothing else: plain training to compare a plan with.

    The KV cache changes the order of sums, so with it even plain training has other last bits.
    """
    session = Session((), OffloadTransports())
    blocks = modules_of(model, [unit.name for unit in discover_units(model) if unit.role == "block"])
    for owner in cache_owners(model, blocks):
        session.place("", owner, run_without_cache, CacheState(owner))
    return session


def remove(model: nn.Module) -> None:
    """Take every attached choice off a model, whoever attached it: for copies and loaded pickles, which carry a plan
    without its session. Idempotent."""
    for module in model.modules():
        while (forward := attached_to(module)) is not None:
            take_off(module, forward)


def attached_path(model: nn.Module) -> str | None:
    """Where in the model a choice is attached, by name; the root is the empty one. None: nowhere."""
    return next((path for path, module in model.named_modules() if attached_to(module) is not None), None)


def _check_free(model: nn.Module, units: Sequence[PlannedUnit]) -> None:
    names: dict[int, str] = {}
    for unit in units:
        if (other := names.setdefault(id(unit.module), unit.name)) != unit.name:
            raise PlanError(
                f"{other} and {unit.name} are one and the same module",
                remedy="Make a choice for one of the names only.",
            )
    if (path := attached_path(model)) is not None:
        raise ConflictError(
            f"a plan is applied to this model already (at {path or 'its root'})",
            remedy="Remove it first: handle.remove(), or autockpt.runtime.remove(model) for a copied model.",
        )
    refuse_wrappers(model)
    for unit in units:
        refuse_lazy(unit.module, unit.name)
    for path, module in model.named_modules():
        refuse_native(module, path)


def look_after(model: nn.Module, session: Session) -> GuardState:
    """Attach, around units with choices, what looks after the model as a whole."""
    for owner in cache_owners(model, [unit.module for unit in session.order if unit.choice.kind != "save"]):
        session.place("", owner, run_without_cache, CacheState(owner))
    root = unwrap(model)
    state = GuardState(root, session.listeners)
    session.place("", root, run_guarded, state)
    return state
