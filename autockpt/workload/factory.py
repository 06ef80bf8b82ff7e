"""Workloads that the user's own function makes: ``package.module:function``."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from autockpt.errors import WorkloadError
from autockpt.schema.base import did_you_mean
from autockpt.schema.workload import WorkloadSpec, as_option
from autockpt.workload.failures import is_out_of_memory, workload_error
from autockpt.workload.step import Step

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_RETURNS = "It must return (model, batch), (model, batch, loss) or a Step, the model a torch.nn.Module."
# Settings of the spec that only a factory which takes them can follow.
_PASSED_ON = ("batch_size", "seq_len", "packed", "dtype", "attn", "trust_remote_code", "stage")
# Settings that are followed whatever a factory returns; what else a Step leaves open, it has decided itself.
_FOLLOWED = ("model", "units", "seed", "master_weights", "keep_gradients", "ddp", "shard")


def is_factory(name: str) -> bool:
    """Whether a model's name has the form ``package.module:function``."""
    return _REFERENCE.fullmatch(name) is not None


def call_factory(spec: WorkloadSpec) -> Step | tuple[nn.Module, Any, Any]:
    """Call the user's function: the Step that it made, or model, batch and loss (None: the model's own) for one.

    Options such as ``batch_size`` are passed where the function has a parameter of that name. Raises WorkloadError for
    a function that cannot be found, fails, returns something else, or does not take an option that was given.
    """
    function = _find(spec.model)
    arguments = _arguments(function, spec)
    try:
        returned = function(**arguments)
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise workload_error(error, spec.model) from None
    if isinstance(returned, Step):
        for name in _given(spec, [n for n in WorkloadSpec.model_fields if n not in (*_PASSED_ON, *_FOLLOWED)]):
            raise WorkloadError(
                f"{as_option(name)} has no effect on {spec.model}, which makes its own Step",
                remedy="Set it up in the function; or return (model, batch), which options are applied to.",
            )
        return returned
    if isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[0], nn.Module):
        return returned if len(returned) == 3 else (*returned, None)
    what = (
        ", ".join(type(part).__name__ for part in returned) if isinstance(returned, tuple) else type(returned).__name__
    )
    raise WorkloadError(f"{spec.model} returned {what}", remedy=_RETURNS)


def asked_length(spec: WorkloadSpec) -> int | None:
    """The ``seq_len`` that the user's function is called with, its own default included; None where it takes none."""
    if spec.seq_len is not None:
        return spec.seq_len
    try:
        own = inspect.signature(_find(spec.model)).parameters["seq_len"].default
    except (KeyError, TypeError, ValueError):
        return None
    return own if isinstance(own, int) and own > 0 else None


_NEEDED = {"batch_size": ", which a search for a global batch needs", "seq_len": ", which a search for lengths needs"}


def _find(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise WorkloadError(
                f"there is no Python module {error.name!r}",
                remedy=f"It is looked for in {os.getcwd()} and among the installed packages."
                + (f" A file goes by its module's name: {module_name[:-3]}:{attribute}." * module_name.endswith(".py")),
            ) from None
        raise workload_error(error, f"importing {module_name}", remedy=f"Is {error.name} installed here?") from None
    except (Exception, SystemExit) as error:
        raise workload_error(error, f"importing {module_name}") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            remedy = did_you_mean(part, dir(found)) or _RETURNS
            raise WorkloadError(f"{module_name} has nothing named {part!r}", remedy=remedy)
        found = getattr(found, part)
    if not callable(found):
        raise WorkloadError(f"{name} is no function but of type {type(found).__name__}", remedy=_RETURNS)
    return found


def _arguments(function: Callable[..., Any], spec: WorkloadSpec) -> dict[str, Any]:
    """The options that the user gave, as keyword arguments; all of them must be known to the function."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    taken = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    given = _given(spec, _PASSED_ON)
    for name in given:
        if name not in taken and not takes_all:
            raise WorkloadError(
                f"{as_option(name)} has no effect on {spec.model}, which makes its own model and batch",
                remedy=f"Leave it out, or give the function a parameter named {name}{_NEEDED.get(name, '')}.",
            )
    if "seed" in taken:
        given["seed"] = spec.seed
    return given


def _given(spec: WorkloadSpec, names: Iterable[str]) -> dict[str, Any]:
    """Of these settings those that are not as they are by default."""
    defaults = WorkloadSpec.model_fields
    return {name: getattr(spec, name) for name in names if getattr(spec, name) != defaults[name].default}
