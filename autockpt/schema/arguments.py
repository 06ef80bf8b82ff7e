"""Public functions of Python: arguments of the wrong kind are refused at once, errors say what options are called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from autockpt.errors import AutockptError, UsageError
from autockpt.schema.base import first_violation, short, unfit

P = ParamSpec("P")
R = TypeVar("R")

OPTIONS_IN_PYTHON = (
    "In Python an option, or a key of a --job file, is an argument of the same name: --seq-len 512 is seq_len=512."
)


def python_door(function: Callable[P, R]) -> Callable[P, R]:
    """A function that raises UsageError for arguments of another kind than it says, naming the first one.

    Kinds that pydantic knows nothing of (a model, a step) are left to the function. Its errors say how an option that
    they name is called in Python.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _errors_in_python():
            given = signature.bind(*args, **kwargs)
            for name, adapter in _adapters(function).items():
                if name in given.arguments:
                    given.arguments[name] = _fitting(name, given.arguments[name], adapter)
            result = function(*given.args, **given.kwargs)
            return cast(R, _raising_in_python(result)) if inspect.isgenerator(result) else result

    return call


@functools.cache
def _adapters(function: Callable[..., Any]) -> Mapping[str, TypeAdapter[Any]]:
    """What checks each named argument that can be checked."""
    found, hints = dict[str, TypeAdapter[Any]](), get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if name in hints and parameter.kind != inspect.Parameter.VAR_KEYWORD:
            with suppress(PydanticSchemaGenerationError):
                found[name] = TypeAdapter(hints[name])
    return found


def _fitting(name: str, value: Any, adapter: TypeAdapter[Any]) -> Any:
    """The argument as it was given, or what stands for it without loss, as 3 for "3"."""
    with suppress(ValidationError):
        adapter.validate_python(value, strict=True)
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise UsageError(f"{name}={short(value)}: {first_violation(error)[1]}") from None


@contextmanager
def _errors_in_python() -> Iterator[None]:
    try:
        yield
    except AutockptError as error:
        if "--" in str(error) and OPTIONS_IN_PYTHON not in error.remedy:
            error.remedy = f"{error.remedy}\n{OPTIONS_IN_PYTHON}".strip()
        raise
    except ValidationError as error:
        raise unfit(error) from None


def _raising_in_python(values: Iterator[Any]) -> Iterator[Any]:
    """The same values, whose errors come when they are asked for."""
    with _errors_in_python():
        yield from values
