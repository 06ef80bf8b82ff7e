from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.schema import Graph, Hardware, Op, Phase, Storage, Unit, WorkloadSpec
from autockpt.schema.graph import TensorMeta
from autockpt.shipped import load_hardware
from autockpt.tracing.kernels.allocator import MIB, replay, requests
from autockpt.tracing.kernels.cuda_memory import as_seen_by, workspace_of
from autockpt.tracing.kernels.timeline import bytes_timeline

CARD, CPU = load_hardware("rtx4090"), load_hardware("cpu")


def op(index: int, phase: Phase, unit: str | None = None, outputs: tuple[TensorMeta, ...] = ()) -> Op:
    return Op(index=index, target="aten.mm.default", phase=phase, module="", unit=unit, signature=0, outputs=outputs)


def meta(storage: int, dtype: str, values: int) -> TensorMeta:
    return TensorMeta(shape=(values,), stride=(1,), dtype=dtype, storage=storage)


VALUES = 1 << 20  # of the weight of each block
# two blocks a and b: forward a, forward b, backward b, backward a, then an optimizer step of two ops
PLACES: tuple[tuple[Phase, str | None], ...] = (
    ("forward", "a"),
    ("forward", "b"),
    ("backward", "b"),
    ("backward", "a"),
    ("optimizer", None),
    ("optimizer", None),
)


def step(dtype: str = "bfloat16") -> Graph:
    """A step of two blocks, with AdamW's two states, its temporaries and a gradient for each of the two weights."""
    item = 2 if dtype == "bfloat16" else 4
    n = VALUES * item
    storages = [
        Storage(id=0, bytes=n, birth=-1, death=None, kind="weight", unit="a"),
        Storage(id=1, bytes=n, birth=-1, death=None, kind="weight", unit="b"),
        *(Storage(id=i, bytes=n, birth=-1, death=None, kind="optimizer") for i in (2, 3, 4, 5)),
        *(Storage(id=i, bytes=4, birth=-1, death=None, kind="optimizer") for i in (6, 7)),
        Storage(id=8, bytes=1000, birth=-1, death=None, kind="other"),
        Storage(id=9, bytes=7 * MIB, birth=0, death=3, kind="activation", unit="a"),
        Storage(id=10, bytes=n, birth=2, death=5, kind="gradient", unit="b"),
        Storage(id=11, bytes=n, birth=3, death=5, kind="gradient", unit="a"),
        Storage(id=12, bytes=2 * n, birth=4, death=4, kind="optimizer"),
    ]
    resident = {"weights": 2 * n, "optimizer states": 4 * n + 8, "buffers and batch": 1000}
    made = {2: (meta(10, dtype, VALUES),), 3: (meta(11, dtype, VALUES),)}
    return Graph(
        resident_bytes=sum(resident.values()),
        resident=resident,
        signatures=("",),
        work=(),
        ops=tuple(op(i, phase, unit, made.get(i, ())) for i, (phase, unit) in enumerate(PLACES)),
        storages=tuple(storages),
        units=(Unit(name="a", cls="A", kind=0), Unit(name="b", cls="A", kind=0)),
    )


def seen(graph: Graph, device: Hardware | None = None, **spec: Any) -> Graph:
    """The same step on a device; consistent, as every graph is."""
    result = as_seen_by(device or CARD, graph, WorkloadSpec(model="m", **spec))
    assert (
        result.resident_bytes == sum(s.bytes for s in result.storages if s.birth < 0) == sum(result.resident.values())
    )
    assert len({s.id for s in result.storages}) == len(result.storages)
    for s in result.storages:
        assert s.bytes >= 0 and s.birth < len(result.ops)
        assert s.death is None or s.birth <= s.death
    assert result.ops == graph.ops and result.units == graph.units
    return result


def test_matrix_workspaces_are_there_all_the_time() -> None:
    workspace, plain = workspace_of("cuda", (8, 0)), step()
    kept = seen(plain)
    assert kept.resident_bytes - plain.resident_bytes == kept.resident["matrix workspaces"] == 2 * workspace
    assert "matrix workspaces" in seen(plain, CARD.model_copy(update={"kind": "rocm"})).resident


def test_eight_bit_states() -> None:
    graph = seen(step("bfloat16"), CPU, optimizer="adamw8bit")
    states = graph.resident["optimizer states"]
    assert states == 4 * (VALUES + VALUES // 256 * 4) + 8
    assert not any(s.id == 12 for s in graph.storages)  # one kernel, no temporaries
    wide = seen(step("float32"), CPU, optimizer="adamw8bit")
    assert wide.resident["optimizer states"] == states


def test_master_weights() -> None:
    graph = seen(step("bfloat16"), CPU, master_weights=True)
    assert graph.resident["optimizer states"] == 4 * VALUES * 4 + 8
    assert graph.resident["master weights"] == 2 * VALUES * 4
    assert next(s.bytes for s in graph.storages if s.id == 12) == 2 * VALUES * 4
    plain = step("float32")
    assert seen(plain, CPU, master_weights=True) == plain


def test_ddp() -> None:
    plain = seen(step(), CPU)
    views = seen(step(), CPU, ddp="views")
    buckets = seen(step(), CPU, ddp="buckets")
    n = 2 * VALUES * 2
    assert views.resident_bytes == plain.resident_bytes + n
    assert (
        buckets.resident_bytes
        == plain.resident_bytes + n
        == plain.resident_bytes + buckets.resident["gradient buckets"]
    )
    # one bucket, twice its bytes, once the last gradient is made; the optimizer waits
    assert [(c.bytes, c.issued, c.awaited) for c in views.copies] == [(2 * n, 4, 4)] and not plain.copies
    # bucket views take no gradients besides, copies do
    assert bytes_timeline(buckets)[4] == bytes_timeline(views)[4] + n


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1, 9), st.integers(0, 9), st.integers(1, 30 * MIB)), max_size=40), st.integers(1, 3)
)
def test_reserved_covers_allocated_covers_the_timeline(rows: list[tuple[int, int, int]], cycles: int) -> None:
    storages = tuple(
        Storage(id=i, bytes=n, birth=b, death=None if b < 0 else min(b + d, 9)) for i, (b, d, n) in enumerate(rows)
    )
    resident = sum(s.bytes for s in storages if s.birth < 0)
    graph = Graph(
        resident_bytes=resident,
        signatures=("",),
        work=(),
        ops=tuple(op(i, "forward") for i in range(10)),
        storages=storages,
    )
    peak = replay(requests(graph, cycles))
    assert peak.reserved >= peak.allocated >= graph.peak_bytes


def test_outputs_kept_until_the_next_forward_are_held_once_after_it() -> None:
    n = 40 * MIB
    storages = (
        Storage(id=0, bytes=n, birth=-1, death=3),
        Storage(id=1, bytes=n, birth=2, death=None),
        Storage(id=2, bytes=n, birth=5, death=6),
    )
    ops = tuple(op(i, "forward") for i in range(8))
    graph = Graph(resident_bytes=n, signatures=("",), work=(), ops=ops, storages=storages)
    for cycles in (1, 2, 3):
        assert replay(requests(graph, cycles)).reserved == graph.peak_bytes == 2 * n
