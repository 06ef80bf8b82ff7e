"""What a profiler saw on the device: kernels, copies, and how much of the copies ran beside kernels."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

Span = tuple[float, float]  # begin and end in seconds
WAITS = re.compile(r"cu(da)?(Device|Stream|Ctx|Event)Synchronize|cudaMemcpy(2D)?$")


@dataclass(frozen=True)
class DeviceEvents:
    """Intervals of one profiled stretch of work; ``waits``: calls by which the host waited for the device."""

    kernels: list[tuple[str, Span]]
    out: list[Span]
    back: list[Span]
    waits: list[str]


def profiled(fn: Callable[[], None], cuda: bool) -> DeviceEvents:
    """What ``fn`` did on the device."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as recorded:
        fn()
        if cuda:
            torch.cuda.synchronize()  # the one wait that is not the step's
    found = DeviceEvents([], [], [], [])
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        name = event.name()
        if event.device_type().name == "CPU" or event.is_user_annotation():
            if WAITS.match(name):
                found.waits.append(name)
            continue
        span = event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9
        if name.startswith("Memcpy DtoH"):
            found.out.append(span)
        elif name.startswith("Memcpy HtoD"):
            found.back.append(span)
        elif not name.startswith(("Memcpy", "Memset")) and event.duration_ns() > 0:
            found.kernels.append((name, span))
    return found


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of intervals, in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def total(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def hidden(copies: Iterable[Span], kernels: Iterable[Span]) -> float | None:
    """The share of the copies' time during which a kernel ran; None without copies."""
    copies, kernels = merged(copies), merged(kernels)
    shared = total(copies) + total(kernels) - total(merged([*copies, *kernels]))
    return shared / total(copies) if copies else None
