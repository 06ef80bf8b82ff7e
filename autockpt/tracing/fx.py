"""The schema's Graph as a ``torch.fx.Graph``, for inspection with PyTorch's own tools."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx.passes.shape_prop import TensorMetadata

from autockpt.schema.graph import Graph, Op, TensorMeta
from autockpt.tracing.kernels.operators import overload_of
from autockpt.tracing.kernels.signature import ATTENTION, Call, TensorSpec, Word, dtype_of, parse_signature, word_value

_Key = tuple[int, int, tuple[int, ...], tuple[int, ...], str]  # storage, offset, shape, stride, dtype
_TOLD = ("phase", "module", "unit", "flops", "inputs", "outputs", "saves")  # of an op in its node's metadata


class StepGraph(fx.Graph):
    """An ``fx.Graph`` of a training step whose table needs no further library."""

    def print_tabular(self) -> None:
        """Print one line per node: operation, name, what it calls, phase, module, result and FLOPs."""
        rows = [("opcode", "name", "target", "phase", "module", "result", "FLOPs")]
        for node in self.nodes:
            meta = node.meta
            result = meta.get("tensor_meta")
            results = [result] if isinstance(result, TensorMetadata) else list(result or ())
            shapes = " ".join(f"{str(r.dtype)[6:]}{list(r.shape)}" for r in results[:3]) + (" …" if results[3:] else "")
            flops = f"{meta['flops']:,}" if meta.get("flops") else ""
            rows.append(
                (node.op, node.name, str(node.target), meta.get("phase", ""), meta.get("module", ""), shapes, flops)
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for i, row in enumerate(rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
            if i == 0:
                print("  ".join("-" * width for width in widths))


def to_fx(graph: Graph) -> fx.Graph:
    """A lint-clean ``fx.Graph`` with one ``call_function`` node per op, in order, and a placeholder per tensor that was
    there before the step.

    Targets are overloads, arguments the nodes that made them (floats that a signature leaves out are 1.0), and each
    op's metadata is in ``node.meta``: ``op`` (the schema's Op), ``phase``, ``module``, ``unit``, ``signature`` (text),
    ``flops``, ``inputs``, ``outputs``, ``saves`` and ``tensor_meta`` as PyTorch's shape propagation has it.
    ``fx.GraphModule({}, to_fx(graph))`` works; running it is not what it is for.
    """
    return _Builder(graph).build()


class _Builder:
    def __init__(self, source: Graph) -> None:
        self._source = source
        self._graph = StepGraph()
        self._makers: dict[_Key, Callable[[], fx.Node]] = {}  # who made this very view of a storage
        self._latest: dict[int, Callable[[], fx.Node]] = {}  # who touched a storage last
        self._calls = [parse_signature(text) for text in source.signatures]
        self._last_placeholder: fx.Node | None = None

    def build(self) -> fx.Graph:
        for op in self._source.ops:
            self._add(op)
        self._graph.output(())
        return self._graph

    def _add(self, op: Op) -> None:
        call = self._calls[op.signature]
        args, kwargs = self._arguments(op, call)
        node = self._graph.call_function(_overload(op.target), args, kwargs)
        metas = [_tensor_metadata(output) for output in op.outputs]
        node.meta = {"op": op, "signature": self._source.signatures[op.signature]}
        node.meta |= {name: getattr(op, name) for name in _TOLD}
        if metas:
            node.meta["tensor_meta"] = metas[0] if len(metas) == 1 else tuple(metas)
        self._remember(node, op, call)

    def _remember(self, node: fx.Node, op: Op, call: Call) -> None:
        """Who wants an output of this op from now on gets it from this node."""
        positions = _positions(_overload(op.target), op, call)
        for position, output in zip(positions, op.outputs, strict=False):
            make = (lambda n=node: n) if position is None else self._item(node, position, output)
            key = (output.storage, output.offset, output.shape, output.stride, output.dtype)
            self._makers[key] = self._latest[output.storage] = make

    def _item(self, node: fx.Node, position: int, output: TensorMeta) -> Callable[[], fx.Node]:
        @cache
        def make() -> fx.Node:
            with self._graph.inserting_after(node):
                item = self._graph.call_function(operator.getitem, (node, position))
            item.meta = {"phase": node.meta["phase"], "module": node.meta["module"]}
            item.meta["tensor_meta"] = _tensor_metadata(output)
            return item

        return make

    def _arguments(self, op: Op, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        offsets = op.offsets or (0,) * len(op.inputs)
        tensors = iter(zip(op.inputs, offsets, strict=True))
        if call.target.startswith(ATTENTION):
            return self._attention_arguments(op, call, tensors)

        def value(item: Any) -> Any:
            if isinstance(item, TensorSpec):
                storage, offset = next(tensors, (-1, 0))
                return self._node(storage, offset, item)
            if isinstance(item, list):
                return [value(inner) for inner in item]
            return word_value(item) if isinstance(item, Word) else item

        return tuple(value(a) for a in call.args), {name: value(v) for name, v in call.kwargs.items()}

    def _attention_arguments(
        self, op: Op, call: Call, tensors: Iterator[tuple[int, int]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A normalised signature names query, key and value only; the kernel's own schema says what else it took."""
        settings = {"dropout_p": call.kwargs["dropout"], "is_causal": call.kwargs["causal"]}
        defaults = {"compute_log_sumexp": True, "grad_input_mask": [True, True, True, False], "max_q": 0, "max_k": 0}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        schema = getattr(_overload(op.target), "_schema", None)
        for argument in schema.arguments if schema is not None else ():
            name, kind = argument.name, str(argument.type)
            if name in ("attn_mask", "attn_bias") and not call.kwargs["mask"]:
                found = None
            elif "Tensor" in kind:
                entry = next(tensors, None)
                found = None if entry is None else self._node(*entry, None)
            elif name in settings or name in defaults:
                found = settings.get(name, defaults.get(name))
            else:
                continue
            if argument.kwarg_only:
                kwargs[name] = found
            else:
                args.append(found)
        return tuple(args), kwargs

    def _node(self, storage: int, offset: int, spec: TensorSpec | None) -> fx.Node | None:
        """The node that made this tensor; a placeholder for one that was there before."""
        if storage < 0:
            return None
        make = None if spec is None else self._makers.get((storage, offset, spec.shape, spec.stride, spec.dtype))
        if make is None and (spec is None or self._source.storages[storage].birth >= 0):
            make = self._latest.get(storage)
        return make() if make is not None else self._placeholder(storage, offset, spec)

    def _placeholder(self, storage: int, offset: int, spec: TensorSpec | None) -> fx.Node:
        graph, last = self._graph, self._last_placeholder
        with graph.inserting_after(last) if last else graph.inserting_before(next(iter(graph.nodes), None)):
            node = graph.placeholder(f"storage_{storage}")
        self._last_placeholder = node
        node.meta = {"storage": self._source.storages[storage]}
        make = self._latest[storage] = lambda: node
        if spec is not None:
            meta = TensorMeta(shape=spec.shape, stride=spec.stride, dtype=spec.dtype, storage=storage, offset=offset)
            node.meta["tensor_meta"] = _tensor_metadata(meta)
            self._makers[(storage, offset, spec.shape, spec.stride, spec.dtype)] = make
        return node


def _overload(name: str) -> Callable[..., Any]:
    """The overload of that name; where this installation has none, a function of that name that cannot be called."""
    try:
        return overload_of(name)
    except (AttributeError, ValueError):
        return _missing(name)


@cache
def _missing(name: str) -> Callable[..., Any]:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not known to this installation of PyTorch")

    missing.__name__ = missing.__qualname__ = name.replace(".", "_")
    return missing


def _positions(target: Any, op: Op, call: Call) -> Sequence[int | None]:
    """At which index of the op's result each of its output tensors stands; None: the result is the tensor."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return [None] if len(op.outputs) == 1 else range(len(op.outputs))
    returns = [str(r.type) for r in schema.returns]
    if len(returns) == 1:
        return [None] if returns[0] == "Tensor" else range(len(op.outputs))
    tensors = [i for i, kind in enumerate(returns) if "Tensor" in kind]
    mask = call.kwargs.get("output_mask", next((a for a in reversed(call.args) if _is_mask(a, len(tensors))), None))
    if len(op.outputs) < len(tensors) and mask is not None:
        return [i for i, wanted in zip(tensors, mask, strict=True) if wanted]
    return tensors


def _is_mask(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(isinstance(item, bool) for item in value)


def _tensor_metadata(meta: TensorMeta) -> TensorMetadata:
    return TensorMetadata(
        shape=torch.Size(meta.shape),
        dtype=dtype_of(meta.dtype),
        requires_grad=False,
        stride=meta.stride,
        memory_format=None,
        is_quantized=False,
        qparams={},
    )
