"""What can be done with a unit's activations.

A new choice is one class here, one file in ``policies`` and one line in the table of policies.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from autockpt.errors import PlanError
from autockpt.schema.base import Data


class _Choice(Data):
    def __str__(self) -> str:
        return self.kind  # type: ignore[attr-defined]


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


Choice = Annotated[Save | Recompute | Offload, Field(discriminator="kind")]
SAVE, RECOMPUTE, OFFLOAD = Save(), Recompute(), Offload()
CHOICE_TYPES: tuple[type[Data], ...] = (Save, Recompute, Offload)
_adapter: TypeAdapter[Any] = TypeAdapter(Choice)


def choice_kinds() -> tuple[str, ...]:
    """Names of all choices, as they are written in plans."""
    return tuple(t.model_fields["kind"].default for t in CHOICE_TYPES)


def parse_choice(value: object) -> Choice:
    """A choice from its form in a plan: a bare name, or a mapping with ``kind`` and options.

    Raises PlanError naming the known choices.
    """
    if isinstance(value, CHOICE_TYPES):
        return value  # type: ignore[return-value]
    try:
        return _adapter.validate_python({"kind": value} if isinstance(value, str) else value)
    except ValidationError:
        known = ", ".join(choice_kinds())
        raise PlanError(f"unknown choice {value!r}", remedy=f"Known choices: {known}.") from None


def dump_choice(choice: Choice) -> str | dict[str, Any]:
    """The shortest form of a choice in a plan: its bare name where it has no options."""
    data = choice.model_dump(exclude_defaults=True) | {"kind": choice.kind}
    return choice.kind if set(data) == {"kind"} else data
