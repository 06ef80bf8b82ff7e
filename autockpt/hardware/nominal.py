"""Op times for a device on which nothing was timed yet: nominal rates, good for ranking choices, not for seconds."""

from __future__ import annotations

from math import prod

from autockpt.hardware.work import work_of_op
from autockpt.schema import Environment, Graph, OpTimes
from autockpt.schema.graph import Op
from autockpt.simulator.estimate import element_bytes

DISK = 1e9  # bytes/s of a file
# (FLOP/s, bytes/s of memory, bytes/s to the tier below): orders of magnitude of common hardware, not of this device.
RATES = {"cpu": (1e11, 1e10, 2e9), "cuda": (1e14, 1e12, 2e10)}
# On a CPU the C library maps larger blocks anew each time, whatever it is told: every page is cleared and faulted in.
MAPPED, FAULTS = 2**25, 2e9  # bytes, bytes/s


def nominal_op_times(environment: Environment, *graphs: Graph) -> OpTimes:
    """Seconds of every signature of ``graphs`` by a roofline of nominal rates for the kind of device."""
    flops_rate, memory_rate, link_rate = RATES.get(environment.device.kind, RATES["cuda"])
    seconds: dict[str, float] = {}
    for graph in graphs:
        for op in graph.ops:
            if (signature := graph.signatures[op.signature]) not in seconds:
                work = work_of_op(op, signature)
                seconds[signature] = max(work.flops / flops_rate, work.bytes / memory_rate)
                if work.kind != "none" and environment.device.kind == "cpu":
                    seconds[signature] += _mapped(op) / FAULTS
    return OpTimes(
        environment=environment,
        seconds=seconds,
        copy_out_bandwidth=link_rate,
        copy_in_bandwidth=link_rate,
        disk_out_bandwidth=DISK,
        disk_in_bandwidth=DISK,
    )


def _mapped(op: Op) -> float:
    """Bytes of an op's results that are blocks of their own mapping; ops in place have none."""
    if op.target.split(".")[1].endswith("_"):
        return 0.0
    sizes = (prod(out.shape) * element_bytes(out.dtype) for out in op.outputs)
    return sum(size for size in sizes if size > MAPPED)
