"""A compiler's graph of forward and backward together, before it is parted: what choices set, refuse and mend there.

All of it holds for one compilation: choices claim it while the compiler traces a unit into it, perhaps several times.
The compiler works on one graph at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autockpt.checkpointing.op_table import written_by

GraphPass = Callable[[GraphModule], None]

_passes: dict[str, GraphPass] = {}
_before: dict[str, Any] = {}


def claim(name: str, run: GraphPass, **settings: Any) -> None:
    """Run ``run`` on the graph of the compilation that is going on, under these of ``torch._functorch.config``.

    Once by its name, however often it is claimed. Errors that it raises end the compilation, wrapped by the compiler.
    """
    from torch._dynamo.callback import callback_handler
    from torch._functorch import config

    if not _passes:
        callback_handler.register_end_callback(_release)
    for key, value in {"joint_custom_pass": _run_all, **settings}.items():
        _before.setdefault(key, getattr(config, key))
        setattr(config, key, value)
    _passes[name] = run


def claimed(setting: str) -> Any:
    """What the compilation that is going on was given for a setting; None where nobody claimed it."""
    from torch._functorch import config

    return getattr(config, setting) if setting in _before else None


def _release(arguments: Any) -> None:
    """The compilation has ended, well or not."""
    from torch._dynamo.callback import callback_handler
    from torch._functorch import config

    for key, value in _before.items():
        setattr(config, key, value)
    _before.clear()
    _passes.clear()
    callback_handler.remove_end_callback(_release)


def _run_all(graph: GraphModule, inputs: Any) -> Any:
    for run in _passes.values():
        run(graph)
    before = _before.get("joint_custom_pass")
    return before(graph, inputs) if callable(before) else graph


def save_reads_of_what_changes(graph: GraphModule) -> None:
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
