"""What can be done with a unit's activations.

A new choice is one class here, one file in ``policies`` and one line in the table of policies.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError

from autockpt.errors import PlanError
from autockpt.schema.base import Data


class _Choice(Data):
    """``searched`` says whether a search tries the choice by itself; in a plan every choice may be written."""

    searched: ClassVar[bool] = True

    def __str__(self) -> str:
        options = self.model_dump(exclude_defaults=True, exclude={"kind"})
        words = ", ".join(f"{name} {value}" for name, value in options.items())
        return f"{self.kind} ({words})" if words else self.kind  # type: ignore[attr-defined]


class Save(_Choice):
    """Keep every activation for the backward pass, as PyTorch does by itself. Nothing is attached."""

    kind: Literal["save"] = "save"


class Recompute(_Choice):
    """Keep only the unit's inputs and run its forward again in backward (Chen et al. 2016, arXiv:1604.06174)."""

    kind: Literal["recompute"] = "recompute"


class Offload(_Choice):
    """Move saved activations off the device after forward and back before backward.

    They go to pinned host memory on an accelerator, to a memory-mapped file where the device is the CPU itself.
    """

    kind: Literal["offload"] = "offload"


class Segment(_Choice):
    """Several consecutive units as one region: only what enters it is kept, and it runs again as a whole in backward.

    ``size`` consecutive units of a plan with this same choice form one region; a run of them that is no multiple ends
    with a shorter one. ``levels`` 1: the whole region is made again at once (Chen et al. 2016, arXiv:1604.06174).
    2: first only what passes between its units, then one unit at a time: less memory for up to one more forward.
    """

    searched: ClassVar[bool] = False

    kind: Literal["segment"] = "segment"
    size: int = Field(default=2, ge=1)
    levels: Literal[1, 2] = 1


Choice = Annotated[Save | Recompute | Offload | Segment, Field(discriminator="kind")]
SAVE, RECOMPUTE, OFFLOAD = Save(), Recompute(), Offload()
CHOICE_TYPES: tuple[type[_Choice], ...] = (Save, Recompute, Offload, Segment)
_adapter: TypeAdapter[Any] = TypeAdapter(Choice)


def choice_kinds() -> tuple[str, ...]:
    """Names of all choices, as they are written in plans."""
    return tuple(t.model_fields["kind"].default for t in CHOICE_TYPES)


def searched_kinds() -> tuple[str, ...]:
    """Names of the choices that a search tries by itself."""
    return tuple(t.model_fields["kind"].default for t in CHOICE_TYPES if t.searched)


def parse_choice(value: object) -> Choice:
    """A choice from its form in a plan: a bare name, or a mapping with ``kind`` and options.

    Raises PlanError naming the known choices, or the option that is wrong.
    """
    if isinstance(value, CHOICE_TYPES):
        return value  # type: ignore[return-value]
    try:
        return _adapter.validate_python({"kind": value} if isinstance(value, str) else value)
    except ValidationError as error:
        raise _complaint(value, error) from None


def _complaint(value: object, error: ValidationError) -> PlanError:
    kind = value.get("kind") if isinstance(value, dict) else None
    known = {t.model_fields["kind"].default: t for t in CHOICE_TYPES}
    if not isinstance(kind, str) or kind not in known:
        return PlanError(f"unknown choice {value!r}", remedy=f"Known choices: {', '.join(known)}.")
    first = error.errors()[0]
    option = str(first["loc"][-1])
    options = [name for name in known[kind].model_fields if name != "kind"]
    if option not in options:
        takes = f"takes {' and '.join(options)} only" if options else "takes no options"
        return PlanError(f"the choice {kind} knows no {option!r}", remedy=f"It {takes}.")
    problem = first["msg"].removeprefix("Input should be ")
    return PlanError(
        f"the choice {kind} cannot have {option} {first['input']!r}", remedy=f"Write a {option} that is {problem}."
    )


def dump_choice(choice: Choice) -> str | dict[str, Any]:
    """The shortest form of a choice in a plan: its bare name where it has no options."""
    data = choice.model_dump(exclude_defaults=True) | {"kind": choice.kind}
    return choice.kind if set(data) == {"kind"} else data
