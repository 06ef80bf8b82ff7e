"""What a plan promises held against what was measured: peaks, step times, and simulations of either."""

from __future__ import annotations

from typing import cast

from autockpt.history.statistics import Interval
from autockpt.history.statistics import judge as judge_interval
from autockpt.schema import Measurement, Plan, WorkloadSpec, format_bytes
from autockpt.schema.verification import Check, CheckState

PEAK_SLACK = 0.01
"""A measured peak may exceed a promised one by this share: allocators differ a little from run to run."""
TIME_SLACK = 0.10
"""A step may be slower than promised by this share, and the noise of both measurements."""
SIMULATED_PEAK_SLACK = 0.05
"""The same for a peak that was simulated for a GPU: its allocator is modelled."""


OTHER_WORKLOAD = "the workload is not the one that the plan was made for: its promise does not count"


def made_for(plan: Plan, spec: WorkloadSpec | None) -> bool:
    """Whether what a plan promises is about this workload; a plan that names none is taken at its word."""
    return plan.workload is None or plan.workload == spec


def simulated_for(plan: Plan) -> str:
    """The device that a plan's numbers were simulated for."""
    return plan.environment.device.name if plan.environment is not None else "a device that the plan does not name"


def judge_peak(plan: Plan, measured: Measurement, kind: str | None = None) -> Check:
    """The measured peak, on a device of ``kind`` (None: the plan's), against the budget and the promised peak.

    One that was simulated for another kind of device is only compared.
    """
    simulated = plan.predicted if plan.status == "simulated" else None
    promise = simulated or plan.measured or plan.predicted if plan.status != "unmeasured" else None
    planned = plan.environment.device.kind if plan.environment is not None else None
    parts, state = [format_bytes(measured.peak_bytes)], cast(CheckState, "skipped")
    if promise is not None:
        said = f"promised {format_bytes(promise.peak_bytes)}"
        if simulated is not None:
            more = measured.peak_bytes / promise.peak_bytes - 1
            said = f"simulated {format_bytes(promise.peak_bytes)} for {simulated_for(plan)} ({more:+.1%})"
        slack = SIMULATED_PEAK_SLACK if simulated is not None and planned != "cpu" else PEAK_SLACK
        parts.append(said)
        state = "passed" if measured.peak_bytes <= promise.peak_bytes * (1 + slack) else "failed"
    if plan.budget is not None:
        parts.append(f"budget {format_bytes(plan.budget.whole)}")
        if measured.peak_bytes > plan.budget.whole:
            state = "failed"
        elif state == "skipped":
            state = "passed"
    if simulated is not None and planned is not None and kind is not None and planned != kind:
        parts.append("another kind of device, so the two are not held against each other")
        state = "skipped"
    elif state == "skipped":
        parts.append("nothing was promised")
    return Check(name="peak", state=state, detail=", ".join(parts))


def judge_time(plan: Plan, measured: Measurement, same_device: bool) -> Check:
    """The measured step time against the promised one, where both come from the same kind of device."""
    state, said = cast(CheckState, "skipped"), "nothing measured was promised"
    if plan.status == "simulated" and plan.predicted is not None and (foreseen := plan.predicted.step_seconds):
        error = f"({measured.step_seconds / foreseen - 1:+.0%}); a simulation is no promise"
        said = f"simulated {foreseen * 1e3:.1f} ms for {simulated_for(plan)} {error}"
    elif plan.status == "measured" and (promise := plan.measured) is not None:
        said = f"promised {time_words(promise)}{'' if same_device else ' on another device'}"
        limit = promise.step_seconds * (1 + TIME_SLACK + promise.noise + measured.noise)
        if same_device:
            state = "passed" if measured.step_seconds <= limit else "failed"
    return Check(name="step time", state=state, detail=f"{time_words(measured)}, {said}")


def time_words(measured: Measurement) -> str:
    """A step time with the half width of its interval, as ``412.0 ms ±0.8 %``."""
    return f"{measured.step_seconds * 1e3:.1f} ms ±{measured.noise * 100:.1f} %"


def judge_ratio(plan: Plan, measured: Measurement, name: str, reference: Measurement, ratio: Interval) -> Check:
    """The step time as a multiple of a well-known plan's, measured interleaved, against the same ratio as promised.

    ``reference`` is what was measured of that plan when ``plan`` was made. Fails only where the ratio is surely worse.
    """
    assert plan.measured is not None
    promise = plan.measured.step_seconds / reference.step_seconds
    limit = promise * (1 + TIME_SLACK + plan.measured.noise + reference.noise)
    detail = (
        f"{time_words(measured)}, {ratio.value:.3f} times {name!r} "
        f"[{ratio.low:.3f}, {ratio.high:.3f}]; promised {plan.measured.step_seconds * 1e3:.1f} ms, {promise:.3f} times"
    )
    broken = judge_interval(ratio, limit) == "slower"
    return Check(name="step time", state="failed" if broken else "passed", detail=detail)
