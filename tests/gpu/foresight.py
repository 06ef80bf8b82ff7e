"""Parts 3 and 4: the card's own hardware description, and what ghost runs and op times promise beside what real steps
take."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autockpt.cost import build_profile, measure_op_times, uniform_graphs
from autockpt.devices import get_device
from autockpt.errors import DeviceOutOfMemory
from autockpt.measuring import WorkerMeasurer
from autockpt.measuring.statistics import median_interval, ratio_interval
from autockpt.schema import Choice, DeviceInfo, Hardware, WorkloadSpec
from autockpt.schema.choices import searched_kinds
from autockpt.shipped import load_hardware
from autockpt.tracing.kernels.allocator import replay, requests
from autockpt.tracing.kernels.cuda_memory import as_seen_by
from tests.gpu.items import Context
from tests.gpu.measuring import ghosts, never_timed, plans
from tests.gpu.shapes import Rates

PLANS = ("save everything", "recompute all", "every second", "keep attention", "offload all", "mixed")


def foresight(context: Context) -> dict[str, Any]:
    """Six plans of one model: peaks and step times, predicted and measured."""
    name = context.item.subject
    spec = WorkloadSpec.model_validate(context.shapes.foresight[name])
    with WorkerMeasurer(spec, context.device) as worker, ghosts(spec, context.device) as tracer:
        blocks = [unit for unit in tracer.units if unit.role == "block"]
        uniform = uniform_graphs(tracer, blocks, searched_kinds())
        device = worker.environment.device
        times, _ = measure_op_times(worker, uniform, name, room=device.capacity_bytes - device.overhead_bytes)
        predictor = build_profile(tracer, times, uniform).predictor
        chosen = plans([unit.name for unit in blocks], PLANS)
        hardware = _hardware(times.device)
        rows: dict[str, Any] = {}
        for plan, choices in chosen.items():
            graph = tracer.trace(choices)
            peak = replay(requests(as_seen_by(hardware, graph, spec)))
            rows[plan] = {
                "allocated, predicted": peak.allocated,
                "reserved, predicted": peak.reserved,
                "step, predicted": predictor.predict(choices).step_seconds,
                "never timed": len(never_timed(graph, times.seconds)),
                "signatures": len(graph.signatures),
                "such as": never_timed(graph, times.seconds)[:3],
            }
            try:
                measured = worker.measure(choices, steps=3)
            except DeviceOutOfMemory as error:
                rows[plan]["message"] = error.message
                continue
            rows[plan]["allocated"] = measured.allocated_bytes or measured.peak_bytes
            rows[plan]["reserved"] = measured.peak_bytes - times.device.overhead_bytes
            context.keep({"rows": rows})
        fitting = {plan: chosen[plan] for plan, row in rows.items() if "allocated" in row}
        _time(rows, fitting, worker, context.shapes.foresight_rounds)
        for row in rows.values():
            for what in ("allocated", "reserved", "step"):
                if row.get(what) and row.get(f"{what}, predicted"):
                    row[f"{what}, error"] = row[f"{what}, predicted"] / row[what] - 1
        return {"rows": rows, "host seconds per op": times.host_seconds, "link out": times.copy_out_bandwidth}


def _time(
    rows: dict[str, Any], fitting: Mapping[str, Mapping[str, Choice]], worker: WorkerMeasurer, rounds: int
) -> None:
    """Step times in turns, and their ratios to saving everything."""
    seconds = worker.compare(fitting, rounds=rounds)
    for plan, times in seconds.items():
        step = median_interval(times)
        rows[plan] |= {"step": step.value, "step between": [step.low, step.high]}
        if "save everything" in seconds:
            ratio = ratio_interval(times, seconds["save everything"])
            rows[plan]["over saving"] = [ratio.low - 1, ratio.value - 1, ratio.high - 1]


def _hardware(device: DeviceInfo) -> Hardware:
    """A described card whose kernels are the device's, with the device's own memory and context."""
    near = load_hardware("h200" if device.kind == "cuda" else "cpu")
    return near.model_copy(update={"memory_bytes": device.capacity_bytes, "context_bytes": device.overhead_bytes})


def calibrate(context: Context) -> dict[str, Any]:
    """``autockpt calibrate``, as a user would call it; its file is left in the folder."""
    command = [sys.executable, "-m", "autockpt", "calibrate", "--device", context.device, "--out", str(context.out)]
    command += ["--json", *(["--quick"] if context.shapes.quick_calibration else [])]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"autockpt calibrate ended with {ran.returncode}: {ran.stderr.strip()[-400:]}")
    return json.loads(ran.stdout)


def rates(context: Context) -> dict[str, Any]:
    """What a time model of the card has to know: elementwise ops, norms' ops and softmax by size, how fast products
    are in the first second and after half a minute, and what the optimizer's two ways take."""
    shapes, device = context.shapes.rates, get_device(context.device).torch_device
    rows: dict[str, Any] = {}
    for size in shapes.sizes:
        x = torch.randn(size << 9, 1024, device=device, dtype=torch.bfloat16)
        full = x.float()
        mean = full[:, :1].contiguous()
        ops: dict[str, tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]] = {
            "add": (lambda x=x: x + x, (x,)),
            "to fp32": (lambda x=x: x.float(), (x,)),
            "pow": (lambda y=full: y.pow(2), (full,)),
            "mean": (lambda y=full: y.mean(-1, keepdim=True), (full,)),
            "scale": (lambda y=full, m=mean: y * m, (full, mean)),
            "softmax": (lambda y=full: torch.softmax(y, -1), (full,)),
        }
        for name, (op, reads) in ops.items():
            seconds, made = _seconds(op, device), op()
            moved = made.nbytes + sum(tensor.nbytes for tensor in reads)
            rows[f"{name}, {size} MiB of bf16"] = {"seconds": seconds, "GB a second": moved / seconds / 1e9}
        context.keep({"rows": rows})
    rows |= _product_rates(shapes, device) | _optimizer_rates(shapes, device)
    return {"rows": rows}


def _product_rates(shapes: Rates, device: torch.device) -> dict[str, Any]:
    """A product on random values, again and again: a card that is hot runs at a lower clock."""
    m, k, n = shapes.product
    first = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    second = torch.randn(k, n, device=device, dtype=torch.bfloat16)
    began, taken = time.monotonic(), list[float]()
    while time.monotonic() - began < shapes.seconds:
        taken.append(_seconds(lambda: first @ second, device, batches=1))
    found = {"in the first second": taken[0], "after all": statistics.median(taken[-5:])}
    return {f"product, {w}": {"seconds": s, "TFLOP a second": 2 * m * k * n / s / 1e12} for w, s in found.items()}


def _optimizer_rates(shapes: Rates, device: torch.device) -> dict[str, Any]:
    """AdamW on bf16 values with states of their type: three tensors and the gradient are read, three written."""
    found = {}
    for way in ("foreach", "fused"):
        values = [torch.randn(shapes.values // 64, device=device, dtype=torch.bfloat16) for _ in range(64)]
        for value in values:
            value.grad = torch.randn_like(value)
        seconds = _seconds(torch.optim.AdamW(values, **{way: True}).step, device)
        found[f"AdamW, {way}"] = {"seconds": seconds, "GB a second": 7 * 2 * shapes.values / seconds / 1e9}
    return found


def _seconds(run: Callable[[], object], device: torch.device, batches: int = 5, times: int = 10) -> float:
    """The median over batches of calls one after another, which the device is waited for once each."""
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    found = []
    for batch in range(batches + 1):  # one to warm up
        wait()
        began = time.perf_counter()
        for _ in range(times):
            run()
        wait()
        found += [(time.perf_counter() - began) / times] if batch else []
    return statistics.median(found)
