"""What can be done with a unit's activations.

A new choice is one class here, one file in ``policies`` and one line in the table of policies.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError

from autockpt.errors import PlanError
from autockpt.schema.base import Data
from autockpt.schema.graph import UnitRole

LAYERS: tuple[UnitRole, ...] = ("block", "attention", "mlp")


class _Choice(Data):
    """``roles`` are the units that a choice is for; not ``exact`` means gradients that are equal up to rounding."""

    roles: ClassVar[tuple[UnitRole, ...]] = LAYERS
    exact: ClassVar[bool] = True

    def __str__(self) -> str:
        return self.kind  # type: ignore[attr-defined]


class Save(_Choice):
    """Keep every activation for the backward pass, as PyTorch does by itself. Nothing is attached."""

    roles: ClassVar[tuple[UnitRole, ...]] = (*LAYERS, "head")
    kind: Literal["save"] = "save"


class Recompute(_Choice):
    """Keep only the unit's inputs and run its forward again in backward (Chen et al. 2016, arXiv:1604.06174)."""

    kind: Literal["recompute"] = "recompute"


class Offload(_Choice):
    """Move saved activations off the device after forward and back before backward.

    They go to pinned host memory on an accelerator, to a memory-mapped file where the device is the CPU itself.
    """

    kind: Literal["offload"] = "offload"


class ChunkedLoss(_Choice):
    """Run a language model's output head and cross-entropy over chunks of tokens, each again in backward.

    For the output head only (``lm_head: chunked_loss``). The one choice that is not bit-equal: sums over tokens are
    taken in another order.
    """

    roles: ClassVar[tuple[UnitRole, ...]] = ("head",)
    exact: ClassVar[bool] = False
    kind: Literal["chunked_loss"] = "chunked_loss"
    tokens: int = Field(default=1024, gt=0, description="rows of logits that exist at a time")


Choice = Annotated[Save | Recompute | Offload | ChunkedLoss, Field(discriminator="kind")]
SAVE, RECOMPUTE, OFFLOAD, CHUNKED_LOSS = Save(), Recompute(), Offload(), ChunkedLoss()
CHOICE_TYPES: tuple[type[_Choice], ...] = (Save, Recompute, Offload, ChunkedLoss)
_adapter: TypeAdapter[Any] = TypeAdapter(Choice)


def choice_kinds(role: UnitRole | None = None) -> tuple[str, ...]:
    """Names of all choices, as they are written in plans; of those that are for one role of units."""
    return tuple(t.model_fields["kind"].default for t in CHOICE_TYPES if role is None or role in t.roles)


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
