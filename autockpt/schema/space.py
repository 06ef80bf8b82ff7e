"""Search spaces: what the search may try, as data."""

from __future__ import annotations

from collections.abc import Container
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from autockpt.errors import UsageError
from autockpt.schema.base import Data, did_you_mean, refused
from autockpt.schema.choices import head_kinds, searched_kinds

_BY_OPTION = {"chunked_loss": "--allow-inexact (its gradients are equal up to rounding)", "compile_budget": "--compile"}
HIDDEN_COPIES = "hidden_copies"


class Knob(Data):
    """The range of one number that steers the solver. ``neutral`` is the value that changes nothing."""

    low: float = Field(allow_inf_nan=False)
    high: float = Field(allow_inf_nan=False)
    log: bool = Field(default=False, description="search the logarithm; low must be above zero")
    neutral: float | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Knob:
        if not self.low < self.high:
            raise ValueError("low must be below high")
        if self.log and self.low <= 0:
            raise ValueError("a logarithmic range must begin above zero")
        if self.neutral is not None and not self.low <= self.neutral <= self.high:
            raise ValueError("neutral must lie between low and high")
        return self


def known_knobs() -> tuple[str, ...]:
    """Names of all knobs: one margin, the copies that hide, and a price per choice that is on the solver's menus."""
    return ("margin", HIDDEN_COPIES, *(f"{kind}_price" for kind in searched_kinds() if kind not in ("save", "segment")))


def _one_of(known: tuple[str, ...]) -> AfterValidator:
    def check(word: str) -> str:
        if word not in known:
            raise refused(f"unknown {word!r}", f"{did_you_mean(word, known)}Known are {', '.join(known)}.")
        return word

    return AfterValidator(check)


def _with_save(kinds: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(kind for kind in searched_kinds() if kind in kinds or kind == "save")


class SearchSpace(Data):
    """What a search may try.

    The solver makes every plan, and ``knobs``, a few numbers, steer it: ``margin`` (share of the budget left free),
    ``<choice>_price`` (factor on the predicted extra seconds of a choice) and ``hidden_copies`` (share of the link's
    time in forward for which units are offloaded behind others' compute). ``head``: what the output head may do
    besides, in all plans of a search. The solver's plans at ``margins`` are tried first.
    """

    search_space: Literal[1] = Field(description="version of the format")
    name: str = ""
    description: str = ""
    choices: Annotated[tuple[Annotated[str, _one_of(searched_kinds())], ...], AfterValidator(_with_save)] = Field(
        default_factory=searched_kinds, description="kinds; always with save"
    )
    head: tuple[Annotated[str, _one_of(head_kinds())], ...] = Field(
        default_factory=head_kinds, description="kinds for the output head besides save"
    )
    margins: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(default=(0.0, 0.02, 0.05), min_length=1)
    knobs: dict[Annotated[str, _one_of(known_knobs())], Knob] = Field(min_length=1)

    @model_validator(mode="after")
    def _fitting_knobs(self) -> SearchSpace:
        for name, knob in self.knobs.items():
            if name in ("margin", HIDDEN_COPIES) and not (knob.low >= 0 and knob.high <= 1):
                raise ValueError(f"knobs go from 0 to 1 where they are shares, as {name} is")
            if name.endswith("_price") and knob.low < 0:
                raise ValueError(f"knobs begin at 0 where they are factors, as {name} is")
        return self

    def restricted(self, kinds: tuple[str, ...]) -> SearchSpace:
        """The same space with fewer choices; knobs of choices that are left out go too. ``save`` always stays.

        Raises UsageError for an unknown choice.
        """
        known = (*searched_kinds(), *head_kinds())
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
        priced = {name: "offload" if name == HIDDEN_COPIES else name.removesuffix("_price") for name in self.knobs}
        knobs = {name: knob for name, knob in self.knobs.items() if name == "margin" or priced[name] in kept}
        head = tuple(c for c in self.head if c in kinds)
        return self.model_copy(update={"choices": kept, "head": head, "knobs": knobs})

    def without(self, kinds: Container[str]) -> SearchSpace:
        """The same space without these choices. Raises UsageError where only ``save`` would be left."""
        return self.restricted(tuple(kind for kind in (*self.choices, *self.head) if kind not in kinds))

    def without_knob(self, name: str) -> SearchSpace:
        """The same space where a number stays as it is."""
        return self.model_copy(update={"knobs": {known: knob for known, knob in self.knobs.items() if known != name}})
