"""The base class of all data objects, and error messages about invalid values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from autockpt.errors import UsageError, without_passwords

T = TypeVar("T")
Facts = dict[str, str | int | float | bool | None]
"""Settings of a step as they came out, by name."""
Command = Annotated[tuple[str, ...], AfterValidator(lambda words: tuple(map(without_passwords, words)))]
"""A command line, word by word, without passwords."""


class Data(BaseModel):
    """A frozen record; unknown keys are errors. Safe to hash, compare, send between processes and write to disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def refused(message: str, remedy: str) -> PydanticCustomError:
    """The exception for a validator to raise; pydantic adds the value's location, ``remedy_of`` reads its remedy."""
    return PydanticCustomError("refused", "{message}", {"message": message, "remedy": remedy})


def validating(parse: Callable[[Any], T]) -> Callable[[Any], T]:
    """Turn a parser that raises AutockptError into a pydantic validator."""

    def validate(value: Any) -> T:
        try:
            return parse(value)
        except UsageError as error:
            raise refused(error.message, error.remedy) from None

    return validate


def remedy_of(error: ValidationError) -> str:
    """The remedy for the first invalid field, if its validator gave one; else empty."""
    return error.errors()[0].get("ctx", {}).get("remedy", "")


def first_violation(error: ValidationError) -> tuple[str, str]:
    """The first invalid field, as ``device.capacity_bytes``, and the reason, in words that follow the name."""
    first = error.errors()[0]
    why = first["msg"].removeprefix("Value error, ")
    return ".".join(map(str, first["loc"])), why[:1].lower() + why[1:]


def short(value: object) -> str:
    """A value as Python writes it, cut where it is long; an object that writes itself at length by its class."""
    if isinstance(value, str | int | float | bool | list | tuple | dict | None):
        text = repr(value)
        return text if len(text) <= 60 else text[:57] + "…"
    return f"<{type(value).__name__}>"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``Did you mean recompute? ``, to begin a remedy with; empty where no known word is near."""
    by_lower = {k.lower(): k for k in known}
    near = get_close_matches(str(word).lower(), by_lower, n=1, cutoff=0.6)
    return f"Did you mean {by_lower[near[0]]}? " if near else ""
