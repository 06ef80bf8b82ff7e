"""Choices inside torch.compile: what the compiler cannot put into one graph says so by name."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
set_compiler: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame  # type: ignore[attr-defined]
"""Says what compiles the Python functions that this thread begins to run (None: nothing does), and returns what did.

Where a choice runs between two graphs (``outside_graphs``) the compiler would take on each small function that it calls
beside the unit, once for every unit, until it gives up on them (``torch._dynamo``'s ``recompile_limit``).
"""


@contextmanager
def compiled_by(compiler: Any) -> Iterator[Any]:
    """Have ``compiler`` (None: nothing) compile what the block begins to run; gives what did before."""
    before = set_compiler(compiler)
    try:
        yield before
    finally:
        set_compiler(before)


def run_as_it_is(function: F, *, calls: bool = True) -> F:
    """Leave a function, and what it ``calls``, uncompiled where it is called from between two graphs.

    Where it can be part of a graph it is. What ``torch.compiler.disable`` does to a function is never part of one.
    """
    _leave(function.__code__, calls)
    return function


@functools.cache
def _leave(code: CodeType, calls: bool) -> None:
    eval_frame: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    action = eval_frame._FrameAction
    called = action.SKIP if calls else action.DEFAULT
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(action.SKIP, called))


def exports() -> bool:
    """Whether a program is made of the ops by ``torch.export``. Up to some torch behind 2.11 the compiler takes
    ``torch.compiler.is_exporting()`` for true wherever it is at work."""
    return torch.compiler._is_exporting_flag


def changes_bits(compiler: Any) -> bool:
    """Whether what ``set_compiler`` returned may make other bits of code than running it as it is: all but compilers
    for looking at it, of which torch's own ``map`` and ``cond`` make use, too."""
    while compiler is not None and not hasattr(compiler, "_compiler_name"):
        # by the second name up to some torch
        compiler = getattr(compiler, "_torchdynamo_orig_backend", getattr(compiler, "_torchdynamo_orig_callable", None))
    return getattr(compiler, "_compiler_name", None) not in _EAGER_BACKENDS


def uncompiled() -> AbstractContextManager[Any]:
    """Inside, compiled functions run as they are: around a dispatch mode over a step of the user's.

    Under a mode torch runs them so by itself, but never again compiles a function that it first met there.
    """
    # not imported where nothing is compiled so far: that takes seconds
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def traces_backward() -> bool:
    """Whether the compiler at work makes forward and backward of one graph: all but those for looking at it do.

    Those run torch's own checkpoint as it stands in the graph, which there looks after nothing.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    backend = InstructionTranslator.current_tx().output.compiler_fn
    return getattr(backend, "_compiler_name", "") not in _EAGER_BACKENDS


_EAGER_BACKENDS = ("eager", "eager_noexcept", "eager_debug", "pre_dispatch_eager", "ts")
# Run for real while the compiler traces: what torch.compiler.assume_constant_result does, which imports the compiler.
traces_backward._dynamo_marked_constant = True  # type: ignore[attr-defined]


def eagerly(run: F, *, recursive: bool = True, reason: str | None = None, warning: str | None = None) -> F:
    """``torch.compiler.disable``, which imports the compiler, but only once one is at work: that takes seconds.

    There ``warning`` is given.
    """
    disabled: list[Callable[..., Any]] = []

    def prepare() -> None:
        if warning is not None:
            warnings.warn(warning, stacklevel=2)
        if not disabled:
            disabled.append(torch.compiler.disable(run, recursive=recursive, reason=reason))

    # Run for real while the compiler traces: what torch.compiler.assume_constant_result does, which imports it as well.
    prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def outside(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() or exports():
            return run(*args, **kwargs)
        prepare()
        return disabled[0](*args, **kwargs)

    # Where the compiler has given up on what calls this (recompile_limit) it is called for real, and the compiler would
    # take on what is in it: in the first of two runs, not in the second.
    run_as_it_is(run, calls=recursive)
    # The compiler counts how often a code object was compiled: each function needs its own.
    outside.__code__ = outside.__code__.replace(co_name=run.__name__)
    return functools.wraps(run)(outside)  # type: ignore[return-value]


def outside_graphs(kind: str, why: str, *, inside: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For an attached forward that the compiler cannot trace: it runs between two graphs.

    The unit inside it is compiled nevertheless, unless ``inside`` says that it cannot be either.
    Where a graph break is not allowed (``fullgraph=True``) the compiler's error then names the choice, with ``why`` and
    what to do. Costs nothing where nothing is being compiled.
    """
    warning = (
        f"layers with autockpt's choice `{kind}` run uncompiled, as slow as without torch.compile, and their gradients "
        "are those of compiled steps up to rounding: leave them out of compiling, or choose save, offload or recompute"
    )
    reason = (
        f"autockpt's choice `{kind}` {why}, so its unit cannot be part of one graph. Compile without "
        "fullgraph=True, or choose save or recompute for it."
    )

    return functools.partial(eagerly, recursive=inside, reason=reason, warning=warning if inside else None)
