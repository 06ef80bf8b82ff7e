"""Public functions of Python: arguments of the wrong kind are refused before anything begins, errors name arguments."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from autockpt.errors import AutockptError, UsageError
from autockpt.schema.base import short, unfit

P = ParamSpec("P")
R = TypeVar("R")

_NOT_ARGUMENTS = {"plan-out": "plan.save()", "fresh": "another out=", "storage": "out=", "resume": "plan"}
_FLAGS = {
    *("again", "allow-inexact", "dry-run", "load-in-4bit", "load-in-8bit", "lora-dora", "master-weights"),
    *("keep-gradients", "liger", "packed", "prepare-kbit", "scaler", "trust-remote-code", "weights"),
}
# a whole command stays as it is; what follows an option is its value where it looks like one
_OPTION = re.compile(
    r"`autockpt [^`]*`|--([a-z][a-z0-9-]*[a-z0-9])(?: (?=[\dA-Z]|sgd|adam|fp\d|bf16|all-linear|layers\b|auto\b))?"
)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A function that raises UsageError for arguments of another kind than it says, naming the first one.

    Kinds that pydantic knows nothing of (a model, a step) are left to the function.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs)
        for name, adapter in _adapters(function).items():
            if name in given.arguments:
                given.arguments[name] = _fitting(function, name, given.arguments[name], adapter)
        return function(*given.args, **given.kwargs)

    return call


def python_door(function: Callable[P, R]) -> Callable[P, R]:
    """The same, whose errors name its arguments where those of the command line would name options."""
    inner = checked(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _errors_in_python():
            result: Any = inner(*args, **kwargs)
            if inspect.isgenerator(result):
                result = _told_in_python(result)
            return result

    return call


def in_python(text: str) -> str:
    """A message with the arguments of ``autockpt.search`` in place of the command line's options."""

    def said(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0]
        argument = _NOT_ARGUMENTS.get(name) or f"{name.replace('-', '_')}={'True' if name in _FLAGS else ''}"
        return argument if argument.endswith("=") else argument + " " * match[0].endswith(" ")

    return _OPTION.sub(said, text)


@functools.cache
def _adapters(function: Callable[..., Any]) -> Mapping[str, TypeAdapter[Any]]:
    """What checks each named argument that can be checked."""
    found, hints = dict[str, TypeAdapter[Any]](), get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if name in hints and parameter.kind != inspect.Parameter.VAR_KEYWORD:
            with suppress(PydanticSchemaGenerationError):
                found[name] = TypeAdapter(hints[name])
    return found


def _fitting(function: Callable[..., Any], name: str, value: Any, adapter: TypeAdapter[Any]) -> Any:
    """The argument as it was given, or what stands for it without loss, as 3 for "3"."""
    try:
        adapter.validate_python(value, strict=True)
        return value
    except ValidationError:
        pass
    try:
        return adapter.validate_python(value)
    except ValidationError:
        taken = _written(get_type_hints(function)[name])
        raise UsageError(
            f"{name}={short(value)} is of type {type(value).__name__}", remedy=f"What {name}= takes: {taken}."
        ) from None


def _written(hint: Any) -> str:
    """A type as people write it, the values that it names one by one: ``'layers' | 'model' | None``."""
    if get_origin(hint) is Literal:
        return " | ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(map(_written, get_args(hint)))
    return "None" if hint is NoneType else re.sub(r"\w+\.", "", inspect.formatannotation(hint))


@contextmanager
def _errors_in_python() -> Iterator[None]:
    try:
        yield
    except AutockptError as error:
        error.message, error.remedy = in_python(error.message), in_python(error.remedy)
        error.args = (error.message,)
        raise
    except ValidationError as error:
        raise unfit(error) from None


def _told_in_python(values: Iterator[Any]) -> Iterator[Any]:
    """The same values, whose errors come when they are asked for."""
    with _errors_in_python():
        yield from values
