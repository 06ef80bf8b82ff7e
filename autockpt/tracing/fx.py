"""The schema's Graph as a ``torch.fx.Graph``, for inspection with PyTorch's own tools."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx.passes.shape_prop import TensorMetadata

from autockpt.schema.graph import Graph, TensorMeta
from autockpt.tracing.kernels.operators import overload_of

_TOLD = ("phase", "module", "unit", "flops", "inputs", "outputs")  # of an op in its node's metadata


def to_fx(graph: Graph) -> fx.Graph:
    """A lint-clean ``fx.Graph`` with one ``call_function`` node per op, in order, and a placeholder per storage that no
    op of the step has made.

    Targets are overloads. Arguments are the nodes that made or last wrote the storages of the tensors that an op takes,
    in order; what else it takes is in its signature. Each op's metadata is in ``node.meta``: ``op`` (the schema's Op),
    ``phase``, ``module``, ``unit``, ``signature`` (text), ``flops``, ``inputs``, ``outputs`` and ``tensor_meta`` as
    PyTorch's shape propagation has it. ``fx.GraphModule({}, to_fx(graph))`` works; running it is not what it is for.
    """
    made = fx.Graph()
    latest: dict[int, fx.Node] = {}  # who made or wrote a storage last
    outputs: set[int] = set()
    for op in graph.ops:
        for storage in op.inputs:
            if storage not in outputs and storage not in latest:
                latest[storage] = made.placeholder(f"storage_{storage}")
                latest[storage].meta = {"storage": graph.storages[storage]}
        outputs |= {output.storage for output in op.outputs}
    for op in graph.ops:
        node = made.call_function(_overload(op.target), tuple(latest[storage] for storage in op.inputs))
        metas = tuple(map(_tensor_metadata, op.outputs))
        node.meta = {"op": op, "signature": graph.signatures[op.signature]}
        node.meta |= {name: getattr(op, name) for name in _TOLD}
        node.meta |= {"tensor_meta": metas[0] if len(metas) == 1 else metas} if metas else {}
        for place, (output, meta) in enumerate(zip(op.outputs, metas, strict=True)):
            item = node
            if len(metas) > 1:
                item = made.call_function(operator.getitem, (node, place))
                item.meta = {"phase": op.phase, "module": op.module, "outputs": (output,), "tensor_meta": meta}
            latest[output.storage] = item
    made.output(())
    return made


@cache
def _overload(name: str) -> Callable[..., Any]:
    """The overload of that name; where this installation has none, a function of that name that cannot be called."""
    try:
        return overload_of(name)
    except (AttributeError, ValueError):

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{name} is not known to this installation of PyTorch")

        missing.__name__ = missing.__qualname__ = name.replace(".", "_")
        return missing


def _tensor_metadata(meta: TensorMeta) -> TensorMetadata:
    return TensorMetadata(torch.Size(meta.shape), getattr(torch, meta.dtype), False, meta.stride, None, False, {})
