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
def test_every_op_is_a_node_with_its_metadata_and_arguments(graph: Graph) -> None:
    traced = to_fx(graph)
    traced.lint()
    assert "def forward" in fx.GraphModule({}, traced).code
    nodes = [node for node in traced.nodes if "op" in node.meta]
    assert [str(node.target) for node in nodes] == [op.target for op in graph.ops]
    for node, op in zip(nodes, graph.ops, strict=True):
        assert node.op == "call_function"
        assert isinstance(node.target, torch._ops.OpOverload)
        assert (node.meta["phase"], node.meta["module"], node.meta["flops"]) == (op.phase, op.module, op.flops)
        if len(op.outputs) == 1:
            assert tuple(node.meta["tensor_meta"].shape) == op.outputs[0].shape
        made = [{o.storage for o in source.meta.get("outputs", ())} for source in node.args]
        made = [s or {source.meta["storage"].id} for s, source in zip(made, node.args, strict=True)]
        assert all(storage in s for storage, s in zip(op.inputs, made, strict=True))
    assert all(n.meta["storage"].birth == -1 for n in traced.nodes if n.op == "placeholder")
