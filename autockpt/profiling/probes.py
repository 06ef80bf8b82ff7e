"""Timing single kernels on the device at hand: the clock, and one small function per figure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.devices import transport_for
from autockpt.devices.random_states import all_random_states_kept
from autockpt.policies.base import setting
from autockpt.runtime import attach
from autockpt.schema.choices import RECOMPUTE, Choice, Remake
from autockpt.schema.machine import ElementTime, Links, ProductTime, Traffic
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import Step, build

T = TypeVar("T")
WATCHED_LAYERS, WATCHED_CALLS = 4, 5
COPY_ROUNDS = 5
SECONDS_AHEAD_PER_CALL = 2e-5
_CLOCK_HERTZ = 2e9
LEAST_SAMPLE = 2e-3  # seconds: shorter samples are repeated until they last that long


def keep_busy(device: torch.device, seconds: float) -> None:
    """Give an accelerator about so long to wait, in which the host queues what comes next: else it would wait for the
    host, and short ops would seem to take as long as launching them. So they do where it has no ``_sleep`` as CUDA."""
    if (sleep := getattr(torch.get_device_module(device), "_sleep", None)) is not None:
        sleep(int(seconds * _CLOCK_HERTZ))


@dataclass(frozen=True)
class Stopwatch:
    """Seconds of a function on one device: the median of ``repeats`` samples after a warm-up.

    On one CPU thread the processor's own time counts, so that what else runs on the machine is no part of it; on an
    accelerator events on the device, so that the host is none.
    """

    device: torch.device
    repeats: int = 7

    def seconds(self, fn: Callable[[], Any]) -> float:
        """Of one call of ``fn``."""
        fn()
        calls = max(1, min(1000, round(LEAST_SAMPLE / max(self.sample(fn, 1), 1e-7))))
        return statistics.median(self.sample(fn, calls) for _ in range(self.repeats)) / calls

    def sample(self, fn: Callable[[], Any], calls: int) -> float:
        """Seconds of ``calls`` calls."""
        if self.device.type != "cpu":
            keep_busy(self.device, calls * SECONDS_AHEAD_PER_CALL)
            begin, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
            stream = torch.accelerator.current_stream(self.device)
            begin.record(stream)
            for _ in range(calls):
                fn()
            end.record(stream)
            end.synchronize()
            return begin.elapsed_time(end) / 1e3
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        for _ in range(calls):
            fn()
        return clock() - start


def time_product(clock: Stopwatch, dtype: str, m: int, k: int, n: int) -> ProductTime:
    """A matrix product; ``tf32`` is one in fp32 with TF32 allowed."""
    kind = getattr(torch, "float32" if dtype == "tf32" else dtype)
    a = torch.randn(m, k, device=clock.device).to(kind)
    b = torch.randn(k, n, device=clock.device).to(kind)
    with setting(torch.backends.cuda.matmul, "allow_tf32", dtype == "tf32"):
        return ProductTime(dtype=dtype, m=m, k=k, n=n, seconds=clock.seconds(lambda: torch.mm(a, b)))


def attention_flops(clock: Stopwatch, dtype: torch.dtype, tokens: int, width: int = 64) -> tuple[float, float]:
    """FLOP/s of fused attention, forward (two products of tokens × tokens × width per head) and backward (five)."""
    shape = (1, 8, tokens, width)
    q, k, v = (torch.randn(shape, device=clock.device, dtype=dtype, requires_grad=True) for _ in range(3))
    upstream = torch.randn(shape, device=clock.device, dtype=dtype)
    product = 2.0 * 8 * tokens * tokens * width

    def both() -> None:
        out = functional.scaled_dot_product_attention(q, k, v)
        torch.autograd.grad(out, (q, k, v), upstream)

    forward = clock.seconds(lambda: functional.scaled_dot_product_attention(q, k, v))
    backward = max(clock.seconds(both) - forward, 0.1 * forward)
    return 2 * product / forward, 5 * product / backward


def vector_flops(clock: Stopwatch, elements: int) -> float:
    """FLOP/s outside of matrix units: a multiply and an add per element, on tensors that fit into a near cache."""
    x, y, z = (torch.rand(elements, device=clock.device) for _ in range(3))
    return 2.0 * elements / clock.seconds(lambda: torch.addcmul(z, x, y, out=z))


def traffic(clock: Stopwatch, nbytes: int, pool_bytes: int) -> Traffic:
    """Additions of two tensors into a third, ``nbytes`` in all, as a step makes them.

    One operand is what the addition before has written, the other and the result have been out of use for
    ``pool_bytes``: a chain in one small set of tensors would find all in the nearest cache and promise too much.
    """
    elements = max(1, nbytes // 12)
    count = max(3, pool_bytes // (4 * elements))
    pool = [torch.zeros(elements, device=clock.device) for _ in range(count)]
    place = 0

    def add() -> None:
        nonlocal place
        before, place = pool[place], (place + 1) % count
        torch.add(before, pool[(place + count // 2) % count], out=pool[place])

    return Traffic(bytes=12 * elements, rate=12 * elements / clock.seconds(add))


def element_probes(device: torch.device, rows: int, columns: int) -> dict[str, tuple[Callable[[], Any], float]]:
    """Kernels by op name, with the bytes they must move, on fp32 matrices of rows × columns."""
    x = torch.randn(rows, columns, device=device)
    y, positive = torch.randn_like(x), torch.rand_like(x) + 0.5
    weight, bias = torch.ones(columns, device=device), torch.zeros(columns, device=device)
    rows_of = torch.randint(0, rows, (rows,), device=device)
    aten: Any = torch.ops.aten
    _, mean, rstd = aten.native_layer_norm(x, [columns], weight, bias, 1e-5)
    soft, logs = torch.softmax(x, -1), torch.log_softmax(x, -1)
    # in one block, as masks are: a random one would measure branches
    scratch, mask = torch.empty_like(x), torch.arange(columns, device=device).expand(rows, -1) < columns // 2
    heads = x.view(8, rows // 8, columns // 64, 64).transpose(1, 2)
    one, two, three = (4.0 * x.numel() * tensors for tensors in (1, 2, 3))
    norm_back = [True, True, True]
    return {
        "tanh": (lambda: aten.tanh(x), two),
        "tanh_backward": (lambda: aten.tanh_backward(x, y), three),
        "gelu": (lambda: aten.gelu(x), two),
        "gelu_backward": (lambda: aten.gelu_backward(x, y), three),
        "silu": (lambda: aten.silu(x), two),
        "silu_backward": (lambda: aten.silu_backward(x, y), three),
        "sigmoid": (lambda: aten.sigmoid(x), two),
        "exp": (lambda: aten.exp(x), two),
        "erf": (lambda: aten.erf(x), two),
        "log": (lambda: aten.log(positive), two),
        "sin": (lambda: aten.sin(x), two),
        "cos": (lambda: aten.cos(x), two),
        "rsqrt": (lambda: aten.rsqrt(positive), two),
        "sqrt": (lambda: aten.sqrt(positive), two),
        "pow": (lambda: aten.pow(positive, 3.0), two),
        "div": (lambda: aten.div(x, positive), three),
        "_softmax": (lambda: aten._softmax(x, -1, False), two),
        "_safe_softmax": (lambda: aten._safe_softmax(x, -1), two),
        "_softmax_backward_data": (lambda: aten._softmax_backward_data(y, soft, -1, torch.float32), three),
        "_log_softmax": (lambda: aten._log_softmax(x, -1, False), two),
        "_log_softmax_backward_data": (lambda: aten._log_softmax_backward_data(y, logs, -1, torch.float32), three),
        "native_layer_norm": (lambda: aten.native_layer_norm(x, [columns], weight, bias, 1e-5), two),
        "native_layer_norm_backward": (
            lambda: aten.native_layer_norm_backward(y, x, [columns], mean, rstd, weight, bias, norm_back),
            three,
        ),
        "mean": (lambda: aten.mean(x, [-1], True), one),
        "sum": (lambda: aten.sum(x, [0], True), one),
        "bernoulli_": (lambda: aten.bernoulli_(scratch, 0.9), two),
        "native_dropout": (lambda: aten.native_dropout(x, 0.1, True), two),
        "where": (lambda: aten.where(mask, x, y), three),
        "cat": (lambda: aten.cat([x, y], -1), 2 * two),
        "embedding": (lambda: aten.embedding(x, rows_of), two),
        "embedding_dense_backward": (lambda: aten.embedding_dense_backward(x, rows_of, rows, -1, False), two),
        "strided_copy": (lambda: heads.clone(memory_format=torch.contiguous_format), two),
    }


def time_elements(clock: Stopwatch, rows: int, columns: int) -> tuple[ElementTime, ...]:
    """All of ``element_probes``; a kernel that this device does not have is left out."""
    found = []
    for name, (fn, nbytes) in element_probes(clock.device, rows, columns).items():
        try:
            seconds = clock.seconds(fn)
        except (RuntimeError, NotImplementedError):
            continue
        elements = rows * columns * (2 if name == "cat" else 1)
        found.append(ElementTime(name=name, elements=elements, bytes=nbytes, seconds=seconds))
    return tuple(found)


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def host_costs(clock: Stopwatch, cycles: int) -> tuple[float, float]:
    """Host seconds per op of a training step, and per region that runs again besides its ops.

    Of a real model with next to no arithmetic (eight tokens, tiny layers), interleaved: plainly and with every layer
    recomputed.
    """
    spec = WorkloadSpec(model="llama-tiny", batch_size=1, seq_len=8, optimizer="sgd")
    workload = build(spec, clock.device)
    layers = [f"model.layers.{i}" for i in range(workload.model.config.num_hidden_layers)]  # type: ignore[union-attr]
    plans = ({}, dict.fromkeys(layers, RECOMPUTE))
    plain_ops, ops = (_under(workload, plan, lambda: _ops_in(workload.cycle)) for plan in plans)
    rounds = [
        tuple(_under(workload, plan, lambda: _host_seconds(clock, workload.cycle)) for plan in plans)
        for _ in range(cycles)
    ]
    launch = statistics.median(plain for plain, _ in rounds) / plain_ops
    extra = statistics.median(again - plain for plain, again in rounds) - (ops - plain_ops) * launch
    return launch, max(extra, 0.0) / len(layers)


def watch_seconds(clock: Stopwatch, cycles: int) -> float:
    """Host seconds that an op costs besides where a dispatch mode watches it.

    Of tiny layers, interleaved: plainly and with ``remake``, which notes every op. The random state is left as it was.
    """
    with all_random_states_kept():
        layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(WATCHED_LAYERS)]
        model = nn.Sequential(*layers).to(clock.device)
        batch = torch.rand(1, 8, 16, device=clock.device)
    ops = _ops_in(lambda: model(batch))

    def seconds(plan: Mapping[str, Choice]) -> float:
        with attach(model, plan, sentinels="off"):
            model(batch)
            return statistics.median(_host_seconds(clock, lambda: model(batch)) for _ in range(WATCHED_CALLS))

    watched = {str(i): Remake() for i in range(WATCHED_LAYERS)}
    extra = statistics.median(seconds(watched) - seconds({}) for _ in range(cycles))
    return max(0.0, extra) / ops


def _under(workload: Step, plan: Mapping[str, Choice], measure: Callable[[], T]) -> T:
    """What ``measure`` finds with a plan attached, after a cycle that warms up."""
    with attach(workload.model, plan, sentinels="off") as session:
        session.in_mid_training()
        workload.cycle()
        return measure()


def _ops_in(fn: Callable[[], Any]) -> int:
    counter = _Counter()
    with counter:
        fn()
    return counter.ops


def _host_seconds(clock: Stopwatch, fn: Callable[[], Any]) -> float:
    if clock.device.type == "cpu":
        return clock.sample(fn, 1)
    torch.accelerator.synchronize(clock.device)
    start = time.perf_counter()
    fn()
    seconds = time.perf_counter() - start  # not synchronised: the host's part
    torch.accelerator.synchronize(clock.device)
    return seconds


def time_links(clock: Stopwatch, *, small: int, large: int) -> Links:
    """Copies off the device and back: as offload does them on a CPU, pinned and pageable on an accelerator."""
    if clock.device.type == "cpu":
        now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        small_out, small_back = by_transport(clock.device, small, max(1, large // small), now, lambda: None)
        return Links(out=small_out, back=small_back, small_out=small_out, small_back=small_back)
    out, back = _by_copy(clock, large, pinned=True)
    small_out, small_back = _by_copy(clock, small, pinned=True)
    slow_out, slow_back = _by_copy(clock, large, pinned=False)
    return Links(
        out=max(out, small_out),
        back=max(back, small_back),
        small_out=small_out,
        small_back=small_back,
        pageable_out=slow_out,
        pageable_back=slow_back,
    )


def _by_copy(clock: Stopwatch, nbytes: int, *, pinned: bool) -> tuple[float, float]:
    here = torch.empty(nbytes, dtype=torch.uint8, device=clock.device)
    there = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
    out = clock.seconds(lambda: there.copy_(here, non_blocking=pinned))
    back = clock.seconds(lambda: here.copy_(there, non_blocking=pinned))
    return nbytes / out, nbytes / back


def by_transport(
    device: torch.device, nbytes: int, count: int, now: Callable[[], float], wait: Callable[[], None]
) -> tuple[float, float]:
    """Bytes per second off the device and back, by the transport that offload uses: the best of some rounds.

    Many copies of one size in buffers that earlier rounds used, as in training's steady state. ``now`` is the clock,
    ``wait`` returns when the device has done all of its work.
    """
    transport = transport_for(device)
    sources = [torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
    best_out = best_back = float("inf")
    for _ in range(COPY_ROUNDS):
        wait()
        start = now()
        handles = [transport.send(source) for source in sources]
        for handle in handles:
            handle.settle()
        wait()
        middle = now()
        while handles:
            handles.pop().get()
        wait()
        best_out, best_back = min(best_out, middle - start), min(best_back, now() - middle)
    return count * nbytes / best_out, count * nbytes / best_back
