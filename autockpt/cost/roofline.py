"""Op times of a described device by a roofline model, and nominal op times for devices without a description.

An op takes as long as the slower of its arithmetic and its bytes (Williams, Waterman, Patterson: Roofline, 2009), each
at the share of the peak that real kernels reach, and no less than a kernel takes to start. Products of small
matrices fall short of the peak as ``Efficiency`` says; kernels that are slow for other reasons, such as random numbers
on a CPU, have rates of their own. The host's time is hidden while the GPU's queue is full: see ``queue_floor``.

Nominal rates are good for ranking choices, not for seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, prod

import numpy as np
import torch

from autockpt.errors import UsageError
from autockpt.measuring.environment import installed_versions
from autockpt.schema import DeviceInfo, Environment, Graph, Hardware, Op, OpTimes, words
from autockpt.schema.device import WITHOUT_STREAMS
from autockpt.schema.graph import Work
from autockpt.tracing.kernels.operators import COLLECTIVES
from autockpt.tracing.kernels.signature import ATTENTION

VIEW_SHARE = 0.4  # of an op's host time: a view launches nothing
# Parameters per kernel of the grouped optimizers: 30 to 110 in ATen's MultiTensorApply.cuh, by tensors per parameter.
GROUPED_PARAMETERS = 36
# Host time of a recomputed region besides its ops (contexts, saved tensors, a second pass through the engine), in ops,
# for descriptions without it: 87 to 116 were measured (results/roofline_cpu_202611).
REGION_OPS = 100
# Ops that restore buffers inside a region, as those of batch norms; they run outside of the modules.
_RESTORING = ("aten.copy_.default", "aten.detach.default")
HOSTS = (8e-6, 40e-6)  # seconds per op
MOSTLY_HOST = 0.6  # of a step


def roofline_times(hardware: Hardware, graphs: Iterable[Graph]) -> OpTimes:
    """Seconds of every op signature in ``graphs`` on ``hardware``, with its optimizer phase and copy rates.

    Raises UsageError where an op does arithmetic in a type that the description gives no rate for.
    """
    graphs = tuple(graphs)
    everything = _kernel_seconds(hardware, graphs)
    kernels = {name: 0.0 if name.startswith(COLLECTIVES) else s for name, s in everything.items()}  # in compute's queue
    queued = hardware.kind != "cpu"
    floor = queue_floor(hardware, graphs, kernels) if queued else 0.0
    seconds = {name: max(s, floor) if s > 0 else s for name, s in everything.items()}
    return OpTimes(
        environment=environment_of_hardware(hardware),
        seconds=seconds,
        optimizer_seconds=max((_optimizer_seconds(hardware, g, kernels) for g in graphs), default=0.0),
        host_seconds=0.0 if queued else hardware.launch_seconds,
        rerun_scale=_rerun_scale(hardware, graphs, kernels, seconds),
        copy_out_bandwidth=hardware.link_out * hardware.efficiency.link,
        copy_in_bandwidth=hardware.link_in * hardware.efficiency.link,
        peer_bandwidth=_peer_bandwidth(hardware),
        peer_seconds=hardware.peer_seconds,
    )


def environment_of_hardware(hardware: Hardware) -> Environment:
    """The simulated device, and the versions that simulate it: PyTorch calls ROCm devices ``cuda``, too."""
    device = DeviceInfo(
        kind="cuda" if hardware.kind == "rocm" else hardware.kind,
        name=hardware.description or hardware.name,
        capacity_bytes=hardware.memory_bytes,
        overhead_bytes=hardware.context_bytes,
        copy_queues=hardware.kind not in WITHOUT_STREAMS,
    )
    return Environment(device=device, versions=installed_versions() | {"simulated": hardware.name})


def seconds_of_work(hardware: Hardware, work: Work) -> float:
    """Seconds of one kernel on the device, its launch not included; 0 for what runs no kernel.

    Raises UsageError where the description lacks the rate of the arithmetic's type.
    """
    if work.kind == "none":
        return 0.0
    if work.kind == "link":
        return hardware.peer_seconds + work.bytes / _peer_bandwidth(hardware)
    starting, computing, moving = _terms(hardware, work)
    return max(starting, computing, moving) if work.kind == "elements" else starting + max(computing, moving)


def _peer_bandwidth(hardware: Hardware) -> float:
    return (hardware.peer_bandwidth or min(hardware.link_out, hardware.link_in)) * hardware.efficiency.link


def peak_flops(hardware: Hardware, graph: Graph) -> float:
    """The peak rate of the type in which a step does most of its arithmetic, in FLOP/s."""
    done: dict[float, float] = {}
    for op in graph.ops:
        work = graph.work[op.signature]
        if work.kind in ("matrix", "attention"):
            rate = _matrix_rate(hardware, work)
            done[rate] = done.get(rate, 0.0) + work.flops
    return max(done, key=lambda rate: done[rate]) if done else hardware.vector_flops


def _terms(hardware: Hardware, work: Work) -> tuple[float, float, float]:
    """Seconds of starting a kernel (and unpacking its weight), of its arithmetic, and of the bytes that it moves."""
    moving = (work.bytes - work.unpacked) / _bandwidth(hardware, work.bytes)
    if work.kind == "elements":
        rate = hardware.element_rates.get(work.name)
        own = work.elements / rate if rate else work.flops / hardware.vector_flops
        return hardware.kernel_seconds, own, moving
    efficiency = hardware.efficiency
    share = efficiency.attention if work.name == ATTENTION else efficiency.attention_backward
    if work.kind == "matrix":
        share = efficiency.of_matrix(_matrix_dtype(hardware, work), work.smallest)
    fixed = hardware.kernel_seconds + efficiency.matrix_seconds
    if work.unpacked:
        fixed += hardware.kernel_seconds + work.unpacked / _bandwidth(hardware, work.unpacked)
    return fixed, work.flops / (_matrix_rate(hardware, work) * share), moving


def _matrix_dtype(hardware: Hardware, work: Work) -> str:
    """The arithmetic's type. PyTorch lets convolutions in fp32 use TF32, and products not, by default."""
    convolution = work.name.startswith(("convolution", "_convolution"))
    return "tf32" if convolution and work.dtype == "float32" and "tf32" in hardware.matrix_flops else work.dtype


def _matrix_rate(hardware: Hardware, work: Work) -> float:
    """FLOP/s of the matrix units."""
    dtype = _matrix_dtype(hardware, work)
    if dtype in hardware.matrix_flops:
        return hardware.matrix_flops[dtype]
    if not work.dtype.startswith(("float", "bfloat")):
        return hardware.vector_flops
    known = ", ".join(hardware.matrix_flops)
    raise UsageError(
        f"the hardware {hardware.name} gives no rate for {work.dtype} products (only {known})",
        remedy=f"Train in another type (--dtype, --autocast), or add matrix_flops: {work.dtype} to a file of your own.",
    )


def _bandwidth(hardware: Hardware, nbytes: float) -> float:
    """Bytes per second for an op that touches ``nbytes``: what exceeds the cache comes from memory."""
    memory = hardware.bandwidth * hardware.efficiency.bandwidth
    if not hardware.cache_bandwidth or not hardware.cache_bytes or nbytes <= 0:
        return memory
    cached = min(1.0, hardware.cache_bytes / nbytes)
    return 1.0 / (
        cached / max(memory, hardware.cache_bandwidth * hardware.efficiency.bandwidth) + (1 - cached) / memory
    )


def _kernel_seconds(hardware: Hardware, graphs: Iterable[Graph]) -> dict[str, float]:
    """Seconds of every signature."""
    kinds = (kind for graph in graphs for kind in zip(graph.signatures, graph.work, strict=True))
    return {text: seconds_of_work(hardware, work) for text, work in kinds}


def queue_floor(hardware: Hardware, graphs: Iterable[Graph], kernels: Mapping[str, float]) -> float:
    """The least seconds per kernel with which sums of op times give the steps that two clocks give.

    The host issues ops one after another, each ``launch_seconds``; the device begins one when it was issued and the
    one before has ended. Where the device is behind, small ops cost their kernel alone; where it waits, a launch.
    """
    total, every = 0.0, []
    for graph in graphs:
        device = np.array([kernels[graph.signatures[op.signature]] for op in graph.ops if op.phase != "optimizer"])
        total += two_clocks(device, _host_seconds(hardware, device))
        every.append(device[device > 0])
    device = np.concatenate(every) if every else np.zeros(0)
    low, high = 0.0, float(device.max(initial=0.0)) + 10 * hardware.launch_seconds
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if np.maximum(device, middle).sum() >= total else (middle, high)
    return low


def two_clocks(device: np.ndarray, host: np.ndarray) -> float:
    """Seconds of a step whose ops take ``device`` seconds on a queue that a host fills, ``host`` seconds each.

    The last op to end began when it or one before it was issued, and everything after that ran without a pause: the
    step takes the largest sum of host seconds up to an op and device seconds from it on.
    """
    if not len(device):
        return 0.0
    return float(max(np.max(np.cumsum(host) + np.cumsum(device[::-1])[::-1]), host.sum()))


def waits_for_host(hardware: Hardware, graph: Graph) -> list[str]:
    """A note with the step time on a fast and on a slow host, where launching ops takes most of the step.

    Hosts of published steps took 9 to 17 us an op, that of our H200 28 to 40 (results/published_gpu_202611).
    """
    if hardware.kind == "cpu":
        return []
    kernels, ops = _kernel_seconds(hardware, [graph]), [op for op in graph.ops if op.phase != "optimizer"]
    runs = np.array(graph.runs)[[op.index for op in ops]]
    device = np.array([kernels[graph.signatures[op.signature]] for op in ops]) * runs
    launches = (_host_seconds(hardware, device) + _region_seconds(hardware, ops)) * runs
    optimizer = _optimizer_seconds(hardware, graph, kernels)

    def step(launch_seconds: float) -> tuple[float, float]:
        host = launch_seconds / hardware.launch_seconds * launches
        return two_clocks(device, host) + optimizer, float(host.sum())

    whole, host = step(hardware.launch_seconds)
    if host <= MOSTLY_HOST * whole:
        return []
    fast, slow = (words.seconds(step(launch)[0]) for launch in HOSTS)
    return [f"The step may be host-bound: it takes {fast} where launching an op takes 8 µs, {slow} at 40 µs."]


def _host_seconds(hardware: Hardware, device: np.ndarray) -> np.ndarray:
    return hardware.launch_seconds * np.where(device > 0, 1.0, VIEW_SHARE)


def _region_seconds(hardware: Hardware, ops: Sequence[Op]) -> np.ndarray:
    """What recomputed regions take of the host besides their ops, where each begins."""
    begins, inside = list[bool](), False
    for op in ops:
        begins.append(op.phase == "recompute" and not inside)
        inside = op.phase == "recompute" or (inside and op.target in _RESTORING)
    region = hardware.region_seconds
    return np.array(begins) * (REGION_OPS * hardware.launch_seconds if region is None else region)


def _rerun_scale(
    hardware: Hardware, graphs: Iterable[Graph], kernels: Mapping[str, float], seconds: Mapping[str, float]
) -> float:
    """The host's overhead of recomputed regions, as a factor on their ops."""
    extra = again = 0.0
    for graph in graphs:
        ops = [op for op in graph.ops if op.phase != "optimizer"]
        recomputed = [seconds[graph.signatures[op.signature]] for op in ops if op.phase == "recompute"]
        cost = _region_seconds(hardware, ops)
        again += sum(recomputed)
        if hardware.kind == "cpu":
            extra += float(cost.sum())
            again += hardware.launch_seconds * len(recomputed)
        else:  # what the queue does not hide
            device = np.array([kernels[graph.signatures[op.signature]] for op in ops])
            host = _host_seconds(hardware, device)
            extra += two_clocks(device, host + cost) - two_clocks(device, host)
    return 1.0 + extra / again if again > 0 else 1.0


def _optimizer_seconds(hardware: Hardware, graph: Graph, kernels: Mapping[str, float]) -> float:
    """Seconds of the optimizer: its kernels or the host's launches, whichever take longer; on a CPU both."""
    numbers = [op.signature for op in graph.ops if op.phase == "optimizer"]
    steps = [(graph.work[number], kernels[graph.signatures[number]]) for number in numbers]
    if hardware.kind == "cpu":
        return sum(seconds for _, seconds in steps) + len(steps) * hardware.launch_seconds
    steps = [(work, seconds) for work, seconds in steps if seconds > 0 and not _counts(work)]
    launches = sum(ceil(work.tensors / GROUPED_PARAMETERS) for work, _ in steps)
    return max(sum(seconds for _, seconds in steps), launches * hardware.launch_seconds)


def _counts(work: Work) -> bool:
    """Whether an op of an optimizer raises or reads a counter of steps, which lie on the host."""
    return work.elements <= 1 and work.name in ("add", "add_", "_foreach_add_", "_local_scalar_dense")


DISK = 1e9  # bytes/s of a file
# (FLOP/s, bytes/s of memory, bytes/s to the tier below): orders of magnitude of common hardware, not of this device.
RATES = {"cpu": (1e11, 1e10, 2e9), "cuda": (1e14, 1e12, 2e10)}
# On a CPU the C library maps larger blocks for each allocation: every page is cleared and faulted in.
MAPPED, FAULTS = 2**25, 2e9  # bytes, bytes/s


def nominal_op_times(environment: Environment, graphs: Iterable[Graph]) -> OpTimes:
    """Seconds of every signature of ``graphs`` by a roofline of nominal rates for the kind of device."""
    flops_rate, memory_rate, link_rate = RATES.get(environment.device.kind, RATES["cuda"])

    def seconds_of(op: Op, work: Work) -> float:
        seconds = max(work.flops / flops_rate, work.bytes / (link_rate if work.kind == "link" else memory_rate))
        if environment.device.kind != "cpu" or work.kind == "none" or op.target.split(".")[1].endswith("_"):
            return seconds
        sizes = (prod(out.shape) * getattr(torch, out.dtype).itemsize for out in op.outputs)
        return seconds + sum(size for size in sizes if size > MAPPED) / FAULTS

    seconds: dict[str, float] = {}
    for graph in graphs:
        for op in graph.ops:
            text = graph.signatures[op.signature]
            if text not in seconds:
                seconds[text] = seconds_of(op, graph.work[op.signature])
    return OpTimes(
        environment=environment,
        nominal=True,
        seconds=seconds,
        copy_out_bandwidth=link_rate,
        copy_in_bandwidth=link_rate,
        disk_out_bandwidth=DISK,
        disk_in_bandwidth=DISK,
    )
