"""What is known of the error of simulated step times, and what they leave out: one text for every view of them."""

from __future__ import annotations

from autockpt.schema.device import Environment
from autockpt.schema.workload import WorkloadSpec

_ERRORS = {
    "cuda": "Simulated steps are mostly too short: by 6 % in the median of 39 published steps on NVIDIA GPUs (32 % too "
    "short to 10 % too long), and by a fifth of the device's time on our H200.",
    "cpu": "Simulated steps of nine models on one CPU were 8 to 20 % too short.",
}
_UNKNOWN = "How far simulated steps on this kind of device are off is not known: none was measured."


def step_note(environment: Environment | None, workload: WorkloadSpec | None) -> str:
    """Sentences to print with a simulated step time; empty where steps are not simulated for a described device."""
    if environment is None or "simulated" not in environment.versions:
        return ""
    said = [_ERRORS.get(environment.device.kind, _UNKNOWN)]
    if workload is not None and (workload.shard or 1) > 1:
        said.append(f"The time of collectives over {workload.shard} ranks is not counted.")
    elif workload is not None and workload.ddp is not None:
        said.append("The time of DDP's all-reduce is not counted.")
    return " ".join(said)
