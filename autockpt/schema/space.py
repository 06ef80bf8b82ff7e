"""The search space: which choices a search tries for layers, and for the output head."""

from __future__ import annotations

from collections.abc import Container

from pydantic import Field

from autockpt.errors import UsageError
from autockpt.schema.base import Data, did_you_mean
from autockpt.schema.choices import head_kinds, searched_kinds

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
