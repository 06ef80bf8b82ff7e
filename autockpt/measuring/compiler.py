"""Compile the layers of a model, or the whole model, while it is measured, and restore it afterwards.

Code that was compiled for one plan is reused by the next one: with ``layers`` it is kept per kind of layer and choice,
with ``model`` per plan. On disk the compiler's own cache keeps it beyond the process.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

from autockpt.errors import AutockptError, DeviceOutOfMemory, MeasurementError, UsageError
from autockpt.measuring.failures import chained
from autockpt.schema.choices import SAVE, Choice
from autockpt.schema.plan import CompileMode, plan_hash
from autockpt.workload.step import ignore
from autockpt.workload.units import discover_units, module_of, unwrap

BACKEND = "inductor"
SETTLING = 3
"""Cycles after the first in which a compiler may still have to compile something again."""

Key = tuple[str, ...]
_number = itertools.count()


class Compiler:
    """Compiles a model's steps as ``mode`` says. ``seconds`` of compiling so far, in ``times`` compilations.

    A plan of which a part runs eagerly, or would in a training, in which all layers share one cache, is an error.

    ``beat`` is called with a word whenever a compilation begins or ends. Raises UsageError where this machine has no
    compiler for ``device_kind``.
    """

    def __init__(
        self,
        mode: CompileMode,
        device_kind: str,
        *,
        backend: str = BACKEND,
        beat: Callable[[str], None] = ignore,
    ) -> None:
        if backend == BACKEND and (why := missing(device_kind)):
            raise UsageError(f"steps cannot be compiled here: {why}", remedy="Install it, or leave out --compile.")
        self.mode: CompileMode = mode
        self.seconds, self.times = 0.0, 0
        self._backend, self._beat = backend, beat
        self._functions: dict[Key, Callable[..., Any]] = {}
        self._graphs: dict[Key, int] = {}
        self._began = 0.0

    @contextmanager
    def compiling(self, model: nn.Module, choices: Mapping[str, Choice]) -> Iterator[None]:
        """The model's calls are compiled while the block runs. ``choices`` are attached already.

        Raises UsageError where the model is compiled already, MeasurementError where the compiler fails or gives up.
        """
        from torch._dynamo import config
        from torch._dynamo.callback import callback_handler as callbacks

        placed: list[nn.Module] = []
        callbacks.register_start_callback(self._start)
        callbacks.register_end_callback(self._end)
        try:
            for key, module in self.parts(model, choices):
                if module._compiled_call_impl is not None:
                    raise UsageError(
                        "the model is compiled already", remedy="Give the model as it is before compiling it."
                    )
                module._compiled_call_impl = partial(self._function(key), module)  # type: ignore[assignment]
                placed.append(module)
            # else a plan could silently fall back to eager code
            with config.patch(fail_on_recompile_limit_hit=True), _in_words():
                yield
        finally:
            for module in placed:
                del module._compiled_call_impl  # on the instance; the class attribute is None
            callbacks.remove_start_callback(self._start)
            callbacks.remove_end_callback(self._end)

    def graphs(self, model: nn.Module, choices: Mapping[str, Choice]) -> int:
        """How many graphs the plan's steps were compiled to.

        Raises MeasurementError where a part of the model was not compiled at all, or where there are so
        many that a training, in which all layers share one cache, would reach the compiler's limit and run the rest
        eagerly.
        """
        from torch._dynamo import config

        keys = {key: module for key, module in self.parts(model, choices)}
        for key, module in keys.items():
            if not self._graphs.get(key):
                raise MeasurementError(
                    f"the compiler left {type(module).__name__} to run eagerly",
                    remedy="Run the step with TORCH_LOGS=graph_breaks to see why, or search without --compile.",
                )
        total = sum(self._graphs[key] for key in keys)
        if self.mode == "layers" and total > config.recompile_limit:
            raise MeasurementError(
                f"the layers of this plan need {total} graphs, more than torch._dynamo.config.recompile_limit "
                f"({config.recompile_limit}) allows",
                remedy="Use fewer different choices, or raise the limit here and in training.",
            )
        return total

    def parts(self, model: nn.Module, choices: Mapping[str, Choice]) -> Iterator[tuple[Key, nn.Module]]:
        """The modules that are compiled separately, each with a key that identifies its compiled code."""
        if self.mode == "model":
            yield ("model", plan_hash(choices)), unwrap(model)
            return
        for unit in discover_units(model):
            if unit.role == "block":
                module = unwrap(module_of(model, unit.name))
                inside = [
                    f"{name.removeprefix(unit.name)} {choice}"
                    for name, choice in sorted(choices.items())
                    if (name == unit.name or name.startswith(f"{unit.name}.")) and choice != SAVE
                ]
                yield (str(unit.kind), type(module).__name__, *inside), module

    def _function(self, key: Key) -> Callable[..., Any]:
        if key not in self._functions:
            import torch

            # compiled code is kept by code object, a few versions of each: every function has one of its own
            code = _call.__code__.replace(co_name=f"{_call.__name__}_{next(_number)}")
            own = FunctionType(code, globals(), code.co_name)
            self._functions[key] = torch.compile(own, backend=self._counting(key))
        return self._functions[key]

    def _counting(self, key: Key) -> Callable[..., Any]:
        """The backend, with a counter of the graphs that it compiles for this module."""
        from torch._dynamo import lookup_backend

        compile_graph = lookup_backend(self._backend)

        def backend(graph: Any, inputs: Any) -> Any:
            self._graphs[key] = self._graphs.get(key, 0) + 1
            return compile_graph(graph, inputs)

        return backend

    def _start(self, arguments: Any) -> None:
        self._began = time.perf_counter()
        self._beat("compiling")

    def _end(self, arguments: Any) -> None:
        self.seconds += time.perf_counter() - self._began
        self.times += 1
        self._beat("compiled")


def missing(device_kind: str) -> str:
    """What this machine lacks for compiling; empty where it has all that is known to be needed."""
    if device_kind == "cpu":
        found = any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++"))))
        return "" if found else "no C++ compiler was found (g++, clang++ or $CXX), which torch.compile needs on a CPU"
    return "" if importlib.util.find_spec("triton") else "triton is not installed, which torch.compile needs"


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


@contextmanager
def _in_words() -> Iterator[None]:
    """Turn errors of the compiler into ours; where one of our choices refused, into that error."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    try:
        yield
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        wrapped = (e for e in chained(error) if isinstance(e, AutockptError) and not isinstance(e, DeviceOutOfMemory))
        ours, first = next(wrapped, None), str(error).strip().split("\n")[0]
        if isinstance(error, FailOnRecompileLimitHit):
            first = "a layer had to be compiled again more often than torch._dynamo.config.recompile_limit allows"
        if ours is None:
            remedy = "Run the step compiled by itself to see all of the error."
            ours = MeasurementError(f"the compiler failed: {first}", remedy=remedy)
        raise ours from None
