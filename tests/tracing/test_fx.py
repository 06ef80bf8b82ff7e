from __future__ import annotations

import json

import pytest
import torch
from torch import fx

from autockpt.schema.choices import RECOMPUTE
from autockpt.schema.graph import Graph
from autockpt.schema.workload import WorkloadSpec
from autockpt.tracing import Tracer, to_fx


@pytest.fixture(scope="module", params=["llama-tiny", "resnet-tiny"])
def graph(request: pytest.FixtureRequest) -> Graph:
    with Tracer.from_spec(WorkloadSpec(model=request.param), fallback=False) as tracer:
        return tracer.trace({tracer.units[0].name: RECOMPUTE})


@pytest.mark.slow
def test_every_op_is_a_node_with_its_metadata(graph: Graph) -> None:
    traced = to_fx(graph)
    traced.lint()
    nodes = [node for node in traced.nodes if "op" in node.meta]
    assert [str(node.target) for node in nodes] == [op.target for op in graph.ops]
    for node, op in zip(nodes, graph.ops, strict=True):
        assert node.op == "call_function"
        assert isinstance(node.target, torch._ops.OpOverload)
        assert (node.meta["phase"], node.meta["module"], node.meta["flops"]) == (op.phase, op.module, op.flops)
        if len(op.outputs) == 1:
            assert tuple(node.meta["tensor_meta"].shape) == op.outputs[0].shape


def test_arguments_come_from_the_nodes_that_made_them(graph: Graph) -> None:
    traced = to_fx(graph)
    made: dict[str, list[tuple[int, ...]]] = {}
    for node in traced.nodes:
        if "op" in node.meta and "attention" not in str(node.target):
            assert len(node.all_input_nodes) == len(set(node.all_input_nodes))
        for source in node.all_input_nodes:
            made.setdefault(source.op, []).append(())
    assert made["call_function"] and made["placeholder"]
    inputs = [n for n in traced.nodes if n.op == "placeholder"]
    assert all(n.meta["storage"].birth == -1 for n in inputs)
    product = next(n for n in traced.nodes if str(n.target) in ("aten.mm.default", "aten.convolution.default"))
    op = product.meta["op"]
    sources = [source.meta.get("outputs", ()) for source in product.all_input_nodes]
    storages = {o.storage for outputs in sources for o in outputs}
    storages |= {n.meta["storage"].id for n in product.all_input_nodes if n.op == "placeholder"}
    assert set(op.inputs) <= storages


def test_graph_module_and_table(graph: Graph, capsys: pytest.CaptureFixture[str]) -> None:
    module = fx.GraphModule({}, to_fx(graph))
    assert "def forward" in module.code
    module.graph.print_tabular()
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:3] == ["opcode", "name", "target"]
    assert len(table) == 2 + len(module.graph.nodes)


def test_a_graph_from_a_file_gives_the_same(graph: Graph) -> None:
    again = Graph.model_validate(json.loads(graph.model_dump_json()))
    assert again == graph
    assert [n.name for n in to_fx(again).nodes] == [n.name for n in to_fx(graph).nodes]
