"""The choices: what can be done with a unit's activations.

A new choice is one class here, one file in ``policies`` and one line in the table of policies.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from autockpt.errors import PlanError, UsageError
from autockpt.schema.base import Data, did_you_mean, first_violation, refused, remedy_of, short
from autockpt.schema.graph import Tier, UnitRole

T = TypeVar("T")
LAYERS: tuple[UnitRole, ...] = ("block", "attention", "mlp")
ATTENTION = "fused_attention"
EVERYTHING = "**"


def _words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


class _Choice(Data):
    letter: ClassVar[str]
    """What stands for the choice where a plan is shown in one line."""
    searched: ClassVar[bool] = True
    """Whether a search tries the choice for a layer by itself; in a plan every choice may be written."""
    roles: ClassVar[tuple[UnitRole, ...]] = LAYERS
    """The units that the choice is for."""
    exact: ClassVar[bool] = True
    """Whether gradients are equal bit for bit, not only up to rounding."""
    gathered: bool = Field(default=False, description="FSDP2 keeps the unit's weights gathered until its backward")

    @classmethod
    def says(cls) -> str:
        """What the choice does, for legends: the first line of its class's description."""
        line = (cls.__doc__ or "").partition("\n")[0].rstrip(".")
        return line[:1].lower() + line[1:]

    def __str__(self) -> str:
        options = self.model_dump(exclude_defaults=True, exclude={"kind"})
        listed = ", ".join(name if value is True else f"{name} {_words(value)}" for name, value in options.items())
        return f"{self.kind} ({listed})" if listed else self.kind  # type: ignore[attr-defined]


class Save(_Choice):
    """Keep every activation for backward, as PyTorch does by itself.

    Nothing is attached.
    """

    letter: ClassVar[str] = "."
    roles: ClassVar[tuple[UnitRole, ...]] = (*LAYERS, "head")
    kind: Literal["save"] = "save"


class _Again(_Choice):
    tiles: int = Field(default=1, ge=1, description="parts in which MLPs and norms take a call's tokens")

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.tiles == 1  # kernels may round otherwise for fewer rows, and weights' gradients are sums


class Recompute(_Again):
    """Keep the input alone and run the forward again in backward.

    Chen et al. 2016, arXiv:1604.06174. With ``tiles`` the MLPs and norms inside run on a part of the tokens at a time,
    forward and backward: their wide tensors never exist for a whole sequence (Bekman et al. 2025, arXiv:2506.13996).
    Gradients are then equal up to rounding.
    """

    letter: ClassVar[str] = "R"
    kind: Literal["recompute"] = "recompute"


def _tidy(names: tuple[str, ...]) -> tuple[str, ...]:
    if not all(names):
        raise ValueError("must name modules, none of them by an empty name")
    return (EVERYTHING,) if EVERYTHING in names else tuple(sorted(set(names)))


_Listed = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
Modules = Annotated[tuple[str, ...], _Listed, AfterValidator(_tidy)]


_KEPT = "modules whose matrix products are kept (**: all)"


class _NamesParts(_Choice):
    """A choice whose ``keep`` and ``within`` name modules inside the unit."""

    keep: Modules = Field(default=(), description=_KEPT)
    within: Modules = Field(default=(), description="modules whose ops are recomputed (default: all of the unit's)")

    @model_validator(mode="after")
    def _apart(self) -> Self:
        for name in self.within:
            if name in (EVERYTHING, ATTENTION):
                raise ValueError(f"within must name modules, not {name}")
            if any(name.startswith(f"{other}.") for other in self.within):
                raise ValueError(f"within names {name} and a module around it")
        return self


class Selective(_NamesParts):
    """Keep some outputs and run the rest of the forward again in backward.

    ``keep`` names modules inside the unit (``mlp.up_proj``) whose matrix products and convolutions are not recomputed,
    or ``fused_attention``; by default all of these are kept and only cheap ops are recomputed (Korthikanti et al. 2022,
    arXiv:2205.05198). ``within`` names the modules inside the unit that are recomputed, each by itself, while the rest
    of the unit saves what it saves anyway; by default the whole unit does. With ``within`` there may be nothing to keep
    (``keep: []``).
    """

    letter: ClassVar[str] = "S"
    kind: Literal["selective"] = "selective"
    keep: Modules = Field(default=(EVERYTHING,), description=_KEPT)

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if not self.keep and not self.within:
            raise ValueError("keep must name at least one module; without any, the choice is `recompute`")
        return self


class Remake(_NamesParts):
    """Drop saved tensors and rematerialize each in backward, by the ops that made it.

    What is saved is dropped where it can be made from what is kept anyway, or from something smaller. ``keep`` names
    modules inside the unit whose matrix products and convolutions are not recomputed, ``fused_attention``, or ``**``
    for all of these; by default none. ``within`` names the modules inside the unit whose ops may be recomputed; by
    default all.
    """

    letter: ClassVar[str] = "T"  # of tensors: with M, "OOM" would be a plan
    kind: Literal["remake"] = "remake"


class KeepAttention(_Choice):
    """Keep the output of fused attention and run the rest of the forward again in backward.

    Fused attention recomputes inside itself already.
    """

    letter: ClassVar[str] = "A"
    kind: Literal["keep_attention"] = "keep_attention"


class _Moving(_Choice):
    tier: Tier = Field(default="cpu", description="on an accelerator: pinned host memory, or a file")
    window: int = Field(default=1, ge=1, description="units whose forwards run before the copies are waited for")


class Offload(_Moving):
    """Move saved activations off the device after forward and back before backward.

    ``tier`` says where to: on an accelerator ``cpu`` is pinned host memory and ``disk`` a file without a name. Where
    the device is the CPU itself there is no tier between, and both mean the same: a memory-mapped file.
    Where copies run alongside compute they have until the forward of the unit ``window`` places later has ended: the
    wider, the more of them hides, and the longer the memory is taken.
    """

    letter: ClassVar[str] = "O"
    kind: Literal["offload"] = "offload"


class RecomputeOffload(_Moving, _Again):
    """Run the forward again in backward, and keep its input off the device until then.

    Options are those of ``Offload``, and ``tiles``.
    """

    letter: ClassVar[str] = "B"
    kind: Literal["recompute_offload"] = "recompute_offload"


class Segment(_Choice):
    """Several consecutive units are one region: keep its input alone and run it again in backward.

    ``size`` consecutive units of a plan with this same choice form one region, which is recomputed at once (Chen et al.
    2016, arXiv:1604.06174); a run of them that is no multiple ends with a shorter one.
    """

    letter: ClassVar[str] = "G"
    kind: Literal["segment"] = "segment"
    size: int = Field(default=2, ge=1, description="units of one region")


class ChunkedSoftmax(_Choice):
    """Keep the logits alone; run softmax and cross-entropy on chunks of tokens, again in backward.

    For the output head only (``lm_head: chunked_softmax``). Neither log-probabilities nor their gradients ever exist
    for all tokens, and the logits' gradient takes the place of the logits where nothing else holds these.
    """

    letter: ClassVar[str] = "L"
    searched: ClassVar[bool] = False
    roles: ClassVar[tuple[UnitRole, ...]] = ("head",)
    kind: Literal["chunked_softmax"] = "chunked_softmax"
    chunks: int = Field(default=16, gt=0, description="parts in which the tokens of a call are taken")


class ChunkedLoss(_Choice):
    """Run head and cross-entropy on chunks of tokens, again in backward; gradients are equal up to rounding.

    For the output head only (``lm_head: chunked_loss``). Not bit-equal: sums over tokens are taken in another order.
    """

    letter: ClassVar[str] = "C"
    searched: ClassVar[bool] = False
    roles: ClassVar[tuple[UnitRole, ...]] = ("head",)
    exact: ClassVar[bool] = False
    kind: Literal["chunked_loss"] = "chunked_loss"
    tokens: int = Field(default=1024, gt=0, description="rows of logits that exist at a time")


class CompileBudget(_Choice):
    """Let the compiler save at most a share of what it would save by itself.

    For compiled training only: a layer that is compiled in place (``layer.compile()``) is a graph of its own, layers of
    a model that is compiled as a whole share one. ``fraction`` is PyTorch's ``activation_memory_budget`` for that
    graph: its partitioner chooses op by op what is saved and what is recomputed. A share of saved bytes, not of a peak,
    and a smaller one may well have a higher peak. Code that is compiled otherwise rounds otherwise.
    """

    letter: ClassVar[str] = "P"
    searched: ClassVar[bool] = False
    roles: ClassVar[tuple[UnitRole, ...]] = ("block",)
    exact: ClassVar[bool] = False
    kind: Literal["compile_budget"] = "compile_budget"
    fraction: float = Field(default=0.5, gt=0, lt=1, description="share of the saved bytes; 1 would be `save`")


_OfLayers = Save | Recompute | KeepAttention | Selective | Remake | Offload | RecomputeOffload | Segment
_OfHeads = ChunkedSoftmax | ChunkedLoss
Choice = Annotated[_OfLayers | _OfHeads | CompileBudget, Field(discriminator="kind")]
SAVE, RECOMPUTE, OFFLOAD, GATHERED = Save(), Recompute(), Offload(), Save(gathered=True)
CHUNKED_SOFTMAX, CHUNKED_LOSS = ChunkedSoftmax(), ChunkedLoss()
CHOICE_TYPES: dict[str, type[_Choice]] = {t.model_fields["kind"].default: t for t in get_args(get_args(Choice)[0])}


def choice_kinds(role: UnitRole | None = None) -> tuple[str, ...]:
    """Names of all choices, as they are written in plans; of those that are for one role of units."""
    return tuple(kind for kind, t in CHOICE_TYPES.items() if role is None or role in t.roles)


def searched_kinds() -> tuple[str, ...]:
    """Names of the choices that a search tries for every layer."""
    return tuple(kind for kind, t in CHOICE_TYPES.items() if t.searched)


def head_kinds() -> tuple[str, ...]:
    """Names of the choices that a search tries for the output head unasked: those that are exact."""
    return tuple(kind for kind, t in CHOICE_TYPES.items() if t.roles == ("head",) and t.exact)


def legend(choices: Iterable[Choice]) -> list[str]:
    """A line for each kind of choice that occurs: what it does, and what the options that occur mean."""
    found: dict[str, dict[str, None]] = {}
    for choice in choices:
        options = choice.model_dump(exclude_defaults=True, exclude={"kind"})
        found.setdefault(choice.kind, {}).update(dict.fromkeys(options))
    lines = []
    for kind in sorted(found, key=list(CHOICE_TYPES).index):
        fields = CHOICE_TYPES[kind].model_fields
        options = [f"{name}: {fields[name].description}" for name in fields if name in found[kind]]
        lines.append("; ".join([f"{kind}: {CHOICE_TYPES[kind].says()}", *options]))
    return lines


def _parsed(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, _Choice):
        return value
    kind = value.get("kind") if isinstance(value, Mapping) else value
    if not isinstance(kind, str) or kind not in CHOICE_TYPES:
        near = did_you_mean(kind, CHOICE_TYPES) if isinstance(kind, str) else ""
        raise refused(f"unknown choice {short(kind or value)}", f"{near}Known choices: {', '.join(CHOICE_TYPES)}.")
    try:
        return validate(value if isinstance(value, Mapping) else {"kind": kind})
    except ValidationError as error:
        where, why = first_violation(error)
        options = ", ".join(name for name in CHOICE_TYPES[kind].model_fields if name != "kind") or "none"
        raise refused(f"{where}: {why}", f"Its options: {options}.") from None


WrittenChoice = Annotated[Choice, WrapValidator(_parsed)]
"""In its form in a plan: a bare name, or a mapping with ``kind`` and options."""
_one, _many = TypeAdapter[Choice](WrittenChoice), TypeAdapter(dict[str, WrittenChoice])


def parse_choice(value: object) -> Choice:
    """A choice from its form in a plan. Raises PlanError naming the known choices, or what is wrong with an option."""
    return with_plan_errors(_one.validate_python, value)


def parse_choices(data: Mapping[str, Any]) -> dict[str, Choice]:
    """Choices by unit name from their forms in a plan. Raises PlanError as ``parse_choice`` does, naming the unit."""
    return with_plan_errors(_many.validate_python, data)


IN_TILES = {f"{choice.kind} in tiles": choice for choice in (RecomputeOffload(tiles=8), Recompute(tiles=8))}
"""Where MLPs and norms run in tiles: so many keep their transients below those of attention."""


def on_all_layers(name: str) -> Choice:
    """What all layers do in a uniform plan: a kind of choice by its default options, or one of ``IN_TILES``."""
    return IN_TILES.get(name) or parse_choice(name)


def with_plan_errors(parse: Callable[[Any], T], value: Any) -> T:
    """What ``parse`` makes of a value. Raises PlanError where that does not fit."""
    try:
        return parse(value)
    except ValidationError as error:
        raise PlanError(": ".join(filter(None, first_violation(error))), remedy=remedy_of(error)) from None


def dump_choice(choice: Choice) -> str | dict[str, Any]:
    """The shortest form of a choice in a plan: its bare name where it has no options."""
    options = choice.model_dump(exclude_defaults=True, exclude={"kind"})
    return {"kind": choice.kind} | options if options else choice.kind


def dump_choices(choices: Mapping[str, Choice]) -> dict[str, Any]:
    """Choices by unit name as they are written in a plan, and sent between processes."""
    return {name: dump_choice(choice) for name, choice in choices.items()}


# -- what a search may try -------------------------------------------------------------------------------------------

_GATHERED = "gathered"
_BY_OPTION = {"chunked_loss": "--allow-inexact (its gradients are equal up to rounding)", "compile_budget": "--compile"}


class SearchSpace(Data):
    """What a search may try: kinds of choices for layers, and for the output head besides ``save``.

    Under FSDP2 each choice for a layer with its weights gathered as well, where ``gathered`` allows that.
    """

    choices: tuple[str, ...] = Field(default_factory=searched_kinds, description="always with save")
    head: tuple[str, ...] = Field(default_factory=head_kinds)
    gathered: bool = True

    def restricted(self, kinds: tuple[str, ...]) -> SearchSpace:
        """The same space with fewer choices; ``save`` always stays. Raises UsageError for an unknown choice."""
        known = (*searched_kinds(), *head_kinds(), _GATHERED)
        if by_option := next((kind for kind in kinds if kind in _BY_OPTION), None):
            raise UsageError(
                f"{by_option} is not among the choices that are searched by themselves",
                remedy=f"Leave it out here; it is searched with {_BY_OPTION[by_option]}.",
            )
        if unknown := next((kind for kind in kinds if kind not in known), None):
            remedy = f"{did_you_mean(unknown, known)}Known choices: {', '.join(known)}."
            raise UsageError(f"unknown choice {unknown!r}", remedy=remedy)
        kept = tuple(c for c in self.choices if c in kinds or c == "save")
        if kept == ("save",):
            raise UsageError("with `save` alone there is nothing to choose", remedy="Allow recompute or offload, too.")
        head = tuple(c for c in self.head if c in kinds)
        return SearchSpace(choices=kept, head=head, gathered=self.gathered and _GATHERED in kinds)

    def without(self, kinds: Container[str]) -> SearchSpace:
        """The same space without these choices. Raises UsageError where only ``save`` would be left."""
        return self.restricted(tuple(k for k in (*self.choices, *self.head, _GATHERED) if k not in kinds))
