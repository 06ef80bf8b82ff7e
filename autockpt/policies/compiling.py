"""Choices under torch.compile: which code stays out of graphs, and errors that name a choice where that is not allowed.

PyTorch's partitioner, which splits a graph into forward and backward, has two bugs that give wrong gradients without an
error. The graph is changed, or an error raised, before it is split (``claim``). That holds for one compilation: choices
claim it while the compiler traces a unit into it, perhaps several times. The compiler works on one graph at a time.
"""

from __future__ import annotations

import functools
import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node

from autockpt.checkpointing.op_table import Overload, draws_random_numbers, dropout_of, written_by
from autockpt.errors import ConflictError

F = TypeVar("F", bound=Callable[..., Any])
set_compiler: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame  # type: ignore[attr-defined]
"""Says what compiles the Python functions that this thread begins to run (None: nothing does), and returns what did.

Where a choice runs between two graphs (``outside_graphs``) the compiler would take on each small function that it calls
besides the unit, once for every unit, until it gives up on them (``torch._dynamo``'s ``recompile_limit``).
"""


@contextmanager
def compiled_by(compiler: Any) -> Iterator[Any]:
    """Have ``compiler`` (None: nothing) compile what the block begins to run; gives what did before."""
    before = set_compiler(compiler)
    try:
        yield before
    finally:
        set_compiler(before)


def skip_frames(*functions: Any, calls: bool = True) -> None:
    """Have the compiler skip the frames of functions, and of what they ``calls``, between two graphs.

    There it would compile what autograd and torch call: hooks on saved tensors, modes. Where a function can be part of
    a graph it is.
    """
    # by code object: torch.compiler.disable wraps a function instead, which is then never a part of a graph
    eval_frame: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    action = eval_frame._FrameAction
    called = action.SKIP if calls else action.DEFAULT
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(action.SKIP, called))


def at_trace_time(function: F) -> F:
    """Have the compiler run a function for real while it traces.

    As ``torch.compiler.assume_constant_result``, whose call imports the compiler: that takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def uncompiled() -> AbstractContextManager[Any]:
    """Inside, compiled functions run as they are: around a dispatch mode over a step of the user's.

    Under a mode torch runs them so by itself, but never again compiles a function that it first met there.
    """
    # not imported where nothing is compiled so far: that takes seconds
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@at_trace_time
def traces_backward() -> bool:
    """Whether the compiler at work makes forward and backward of one graph: all but those for looking at it do.

    Those run torch's own checkpoint as it stands in the graph, which there looks after nothing.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    backend = InstructionTranslator.current_tx().output.compiler_fn
    return getattr(backend, "_compiler_name", "") not in _EAGER_BACKENDS


_EAGER_BACKENDS = ("eager", "eager_noexcept", "eager_debug", "pre_dispatch_eager", "ts")


def eagerly(run: F, *, recursive: bool = True, reason: str | None = None, warning: str | None = None) -> F:
    """``torch.compiler.disable``, which imports the compiler, but only once one is at work: that takes seconds.

    There ``warning`` is given.
    """
    disabled: list[Callable[..., Any]] = []

    @at_trace_time
    def prepare() -> None:
        if warning is not None:
            warnings.warn(warning, stacklevel=2)
        if not disabled:
            disabled.append(torch.compiler.disable(run, recursive=recursive, reason=reason))

    def outside(*args: Any, **kwargs: Any) -> Any:
        # up to some torch behind 2.11 `torch.compiler.is_exporting()` is true wherever the compiler is at work
        if not torch.compiler.is_compiling() or torch.compiler._is_exporting_flag:
            return run(*args, **kwargs)
        prepare()
        return disabled[0](*args, **kwargs)

    # Where the compiler has given up on what calls this (recompile_limit) it is called for real, and the compiler would
    # take on what is in it: in the first of two runs, not in the second.
    skip_frames(run, calls=recursive)
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


_PASS, _BUDGET = "joint_custom_pass", "activation_memory_budget"
# Compiled code is cached on disk by the exact number, among other things. Nobody else writes this one, so what is found
# there went through what we do to a graph when it was made: another number for each version of that.
_OURS = 2e-9
_before: dict[str, Any] = {}  # what torch._functorch.config was before the compilation that is going on


@at_trace_time
def claim(fraction: str | None = None) -> None:
    """Have the graph that is being traced mended before it is split, and split with a budget of ``fraction``.

    Raises ConflictError, wrapped by the compiler, where another unit of the same graph asked for another fraction.
    """
    from torch._dynamo.callback import callback_handler
    from torch._functorch import config

    if not _before:
        callback_handler.register_end_callback(_release)
    settings: dict[str, Any] = {_PASS: _mend}
    if fraction is not None:
        settings[_BUDGET] = budget = float(fraction) + _OURS
        if _BUDGET in _before and (other := getattr(config, _BUDGET)) != budget:
            raise ConflictError(
                f"two layers of one graph ask for a compile_budget of {other - _OURS:g} and of {fraction}",
                remedy="One graph has one budget: give all layers the same fraction, or compile them one by one "
                "(layer.compile()) instead of the whole model.",
            )
    for key, value in settings.items():
        _before.setdefault(key, getattr(config, key))
        setattr(config, key, value)


def _release(arguments: Any) -> None:
    """The compilation has ended, well or not."""
    from torch._dynamo.callback import callback_handler
    from torch._functorch import config

    for key, value in _before.items():
        setattr(config, key, value)
    _before.clear()
    callback_handler.remove_end_callback(_release)


def _mend(graph: GraphModule, inputs: Any) -> Any:
    if _BUDGET in _before:
        _refuse_random_numbers(graph)
    _save_reads_of_what_changes(graph)
    before = _before.get(_PASS)
    return before(graph, inputs) if callable(before) else graph


def _refuse_random_numbers(graph: GraphModule) -> None:
    """The partitioner makes random numbers again in backward where its budget is below 1 (pytorch#190758, open as of
    torch 2.15): other masks of dropout, wrong gradients, no error.
    """
    for module in graph.modules():  # graphs within the graph included
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if isinstance(node.target, Overload) and _draws(node):
                raise ConflictError(
                    f"a compile_budget for a graph that draws random numbers ({node.target}) gives wrong gradients: "
                    "PyTorch's partitioner draws others in backward (pytorch#190758)",
                    remedy="Use save or recompute for layers with dropout, or switch their dropout off.",
                )


def _draws(node: Node) -> bool:
    """Attention has dropout as an argument, mostly of zero."""
    target: Any = node.target
    drawn = draws_random_numbers(target, node.args, node.kwargs)
    return drawn or (dropout_of(target) is None and torch.Tag.nondeterministic_seeded in target.tags)


def _save_reads_of_what_changes(graph: GraphModule) -> None:
    """Have the partitioner save what forward reads of inputs that it changes in place, as a buffer with a mean.

    It runs such a read again in backward as any other, and that finds what forward has made of the input: wrong
    gradients, no error (pytorch#197039, open as of torch 2.15).
    """
    from torch.utils.checkpoint import CheckpointPolicy

    for read in _reads(_changed_inputs(graph)):
        for node in (read, *(user for user in read.users if user.target is operator.getitem)):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _changed_inputs(graph: GraphModule) -> list[Node]:
    """Inputs that are written to: by an op within the graph, or, by what its outputs are for, after it has run."""
    inputs = {node: node.meta.get("desc") for node in graph.graph.nodes if node.op == "placeholder"}
    ops = [node for node in graph.graph.nodes if isinstance(node.target, Overload)]
    changed = {op.args[at] for op in ops for at, _ in written_by(op.target) if at < len(op.args)}
    after = [getattr(d, "mutated_input", None) for d in graph.graph.output_node().meta.get("desc") or ()]
    return [node for node, desc in inputs.items() if node in changed or (desc is not None and desc in after)]


def _reads(inputs: list[Node]) -> Iterator[Node]:
    """Forward's ops that read these, views of them and writes to them taken for what they are views of."""
    found = list(inputs)
    for node in found:
        for user in node.users:
            if user.op != "call_function" or user in found:
                continue
            target: Any = user.target
            returns = target._schema.returns if isinstance(target, Overload) else ()
            if any(each.alias_info is not None for each in returns):  # a view
                found.append(user)
            elif "backward" not in user.meta.get("partitioner_tag", "") and "batch_norm" not in str(target):
                yield user  # a batch norm in training changes its statistics and reads them for nothing else
