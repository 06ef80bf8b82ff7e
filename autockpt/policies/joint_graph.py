"""A compiler's graph of forward and backward together, before it is parted: what choices set, refuse and mend there.

PyTorch's partitioner has two faults that give wrong gradients without an error: they are mended or refused here. All of
it holds for one compilation: choices claim it while the compiler traces a unit into it, perhaps several times. The
compiler works on one graph at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autockpt.checkpointing.op_table import draws_random_numbers, dropout_of, written_by
from autockpt.errors import ConflictError

_PASS, _BUDGET = "joint_custom_pass", "activation_memory_budget"
# Compiled code is cached on disk by the exact number, among other things. Nobody else writes this one, so what is found
# there went through what we do to a graph when it was made: another number for each version of that.
_OURS = 2e-9
_before: dict[str, Any] = {}  # what torch._functorch.config was before the compilation that is going on


def claim(fraction: str | None = None) -> None:
    """Have the graph that is being traced mended before it is parted, and parted with a budget of ``fraction``.

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


# What torch.compiler.assume_constant_result does: calling that imports the compiler, which takes a second.
claim._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
    """The partitioner makes random numbers anew in backward where its budget is below 1 (pytorch#190758, open as of
    torch 2.15): other masks of dropout, wrong gradients, no error.
    """
    for module in graph.modules():  # graphs within the graph included
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and _draws(node):
                raise ConflictError(
                    f"a compile_budget for a graph that draws random numbers ({node.target}) gives wrong gradients: "
                    "PyTorch's partitioner draws others in backward (pytorch#190758)",
                    remedy="Use save or recompute for layers with dropout, or switch their dropout off.",
                )


def _draws(node: Node) -> bool:
    """Attention has dropout as an argument, mostly of zero."""
    target: Any = node.target
    if dropout_of(target) is not None:
        return draws_random_numbers(target, node.args, node.kwargs)
    return torch.Tag.nondeterministic_seeded in target.tags


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
    changed = {node.args[at] for node in graph.graph.nodes for at in _written(node)}
    after = [getattr(d, "mutated_input", None) for d in graph.graph.output_node().meta.get("desc") or ()]
    return [node for node, desc in inputs.items() if node in changed or (desc is not None and desc in after)]


def _written(node: Node) -> list[int]:
    """Positions of the arguments that an op changes in place."""
    written = written_by(node.target) if isinstance(node.target, torch._ops.OpOverload) else ()
    return [at for at, _ in written if at < len(node.args)]


def _reads(inputs: list[Node]) -> Iterator[Node]:
    """Forward's ops that read these, views of them taken for what they are views of."""
    found = list(inputs)
    for node in found:
        for user in node.users:
            if user.op != "call_function" or any(_written(user)) or user in found:
                continue
            if _is_view(user):
                found.append(user)
            elif "backward" not in user.meta.get("partitioner_tag", "") and "batch_norm" not in str(user.target):
                yield user  # a batch norm in training changes its statistics and reads them for nothing else


def _is_view(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and any(r.alias_info is not None for r in target._schema.returns)
