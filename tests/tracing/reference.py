"""What a real eager step does, seen by means that have nothing to do with the tracer."""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.runtime import attach
from autockpt.schema import WorkloadSpec
from autockpt.schema.choices import Choice, parse_choice
from autockpt.schema.graph import Graph, Storage, Unit
from autockpt.tracing import Tracer
from autockpt.tracing.kernels.signature import dtype_name
from autockpt.tracing.traced_run import RecordedRun
from autockpt.workload import Step

OpText = tuple[str, tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...]]


class _Watcher(TorchDispatchMode):
    """Lists every op with the layouts of its results; keeps nothing alive."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[OpText] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = result if isinstance(result, (list, tuple)) else (result,)
        layouts = tuple((tuple(t.shape), t.stride(), dtype_name(t.dtype)) for t in found if isinstance(t, Tensor))
        if func.namespace != "profiler":  # names of ranges, as of the optimizer's step
            self.ops.append((str(func), layouts))
        return result


class Real:
    """Facts about the third cycle of a real workload: its ops, its peak, and what the profiler counts."""

    def __init__(self, workload: Step, choices: Mapping[str, Choice] | None = None) -> None:
        off = partial(attach, sentinels="off")  # which check some calls, and not in ghost runs
        session: AbstractContextManager[Any] = off(workload.model, choices) if choices else nullcontext()
        with session:
            for _ in range(2):  # a unit's first two calls look closely at its state
                workload.cycle()
            gc.collect()
            gc.freeze()
            with _Watcher() as watcher:
                workload.cycle()
            self.ops = watcher.ops
            gc.collect()
            self.resident_bytes = workload.resident_bytes()
            self.peak_bytes, self.counts = _profiled(workload.cycle, self.resident_bytes)


def uniform(choice: Any, units: Iterable[Unit]) -> dict[str, Choice]:
    """A choice, or what parses as one, on every block."""
    return {unit.name: parse_choice(choice) for unit in units if unit.role == "block"}


def ghosts(spec: WorkloadSpec, *kinds: Any, **how: Any) -> list[Graph]:
    """Ghost runs of a described job, with each of the choices on every block; of plain training where none is named."""
    with Tracer.from_spec(spec, fallback=False, **how) as tracer:
        return [tracer.trace(uniform(kind, tracer.units)) for kind in kinds or ("save",)]


def record(workload: Step, choices: Mapping[str, Choice] | None = None) -> Graph:
    """The graph of a real cycle in this process, after one that warms up."""
    run = RecordedRun(workload.device)
    run.take(workload)
    return run.trace(choices or {})


def _profiled(run: Callable[[], Any], resident: int) -> tuple[int, Counter[str]]:
    """Most bytes that the CPU allocator held during a call, and how often each ATen operator ran in it.

    Works without any dispatch mode. Blocks that were there before must not be freed in the call: the profiler reports
    their release as zero bytes.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = list(results.events())
    held = most = resident
    for _, nbytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        held += nbytes
        most = max(most, held)
    return most, Counter(e.name().removeprefix("aten::") for e in events if e.name().startswith("aten::"))


def op_counts(run: Callable[[], Any]) -> Counter[str]:
    """How often each ATen operator ran in a call, without any dispatch mode."""
    return _profiled(run, 0)[1]


def peak_over(run: Callable[[], Any]) -> int:
    """Most bytes that the CPU allocator held during a call over what it held before."""
    return _profiled(run, 0)[0]


# The engine adds up and scatters in place in a plain step, and out of place where a dispatch mode is looking.
_SEEN_AS = {
    "aten.add_.Tensor": "aten.add.Tensor",
    "aten.scatter_.src": "aten.scatter.src",
    "aten.scatter_add_.default": "aten.scatter_add.default",
    "aten.index_add_.default": "aten.index_add.default",
    "aten.index_put_.default": "aten.index_put.default",
}


def ops_of(graph: Graph) -> list[OpText]:
    """A graph's ops as the watcher writes them."""
    return [
        (_SEEN_AS.get(op.target, op.target), tuple((m.shape, m.stride, m.dtype) for m in op.outputs))
        for op in graph.ops
    ]


def same_names(ops: list[OpText]) -> list[OpText]:
    """The watcher's ops under the same names."""
    return [(_SEEN_AS.get(name, name), layouts) for name, layouts in ops]


def additions(graph: Graph) -> tuple[int, int]:
    """(in place, out of place) additions of tensors in a graph."""
    targets = Counter(op.target for op in graph.ops)
    return targets["aten.add_.Tensor"], targets["aten.add.Tensor"]


def kept_for_backward(graph: Graph) -> list[Storage]:
    """Activations of forward that are there when backward begins."""
    turn = next(op.index for op in graph.ops if op.phase == "backward")
    return [s for s in graph.storages if 0 <= s.birth < turn and s.kind == "activation" and s.alive_at(turn)]


def mlp(blocks: int = 4, width: int = 64) -> nn.Sequential:
    """A plain stack of blocks."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(blocks))
    )
