"""Parts 3 and 4: the card's own hardware description, and what ghost runs and op times promise beside what real steps
take."""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from autockpt.cost import build_profile, measure_op_times, uniform_graphs
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
