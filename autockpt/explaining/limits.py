"""The largest batch and the longest sequence that fit, by ghost runs of a few sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice

from autockpt.errors import AutockptError
from autockpt.explaining.subject import Subject
from autockpt.schema import Choice, Graph
from autockpt.schema.explanation import Dimension, Largest

MOST_RUNS = 7  # sizes tried per plan and dimension
MOST_TIMES = 64  # as large as now is as far as anybody looks
GRAIN = 32  # sequences are distinguished to a share of 1/32, in powers of two
FIELDS: dict[Dimension, str] = {"batch size": "batch_size", "sequence length": "seq_len"}  # of WorkloadSpec

Peak = Callable[[str, int], int]


@dataclass
class _Search:
    """Brackets the largest size that fits: peaks grow with size, and between two readings about linearly.

    ``floor`` is about what is there at any size: from it and the first reading the second size is guessed.
    """

    budget_bytes: int
    step: int
    most: int
    floor: int
    low: int = 0  # fits, or 0
    high: int = field(init=False)  # does not fit, cannot be built, or is larger than anybody looks
    peaks: dict[int, int] = field(default_factory=dict)
    why: str = ""
    width: int = 0  # between the two when the last guess was made

    def __post_init__(self) -> None:
        self.high = self.most + self.step

    def note(self, size: int, peak: int) -> None:
        self.peaks[size] = peak
        if peak <= self.budget_bytes:
            self.low = max(self.low, size)
        else:
            self.high = min(self.high, size)

    def refuse(self, size: int, why: str) -> None:
        self.high, self.why = min(self.high, size), why

    @property
    def done(self) -> bool:
        """Whether nothing larger is left to try."""
        return self.high - self.low <= self.step or self._next_is_too_large()

    def _next_is_too_large(self) -> bool:
        """Whether the line through the two largest sizes that fit is beyond the budget one step on.

        Peaks are convex in the size (a maximum over moments, each growing linearly or faster), so they lie above it.
        """
        fit = sorted(k for k, peak in self.peaks.items() if peak <= self.budget_bytes)[-2:]
        if len(fit) < 2 or fit[-1] != self.low:
            return False
        slope = (self.peaks[fit[1]] - self.peaks[fit[0]]) / (fit[1] - fit[0])
        return self.peaks[self.low] + slope * self.step > self.budget_bytes

    def guess(self) -> int:
        """The next size to try: where the line through two readings meets the budget, kept within bounds.

        Between one that fits and one that does not their middle, where such lines have not halved that.
        """
        aim = self._aim()
        if self.why and self.low:  # where building ends no line tells; a model's own limits are mostly powers of two
            aim = min(aim, 2 * self.low, (self.low + self.high) // 2)
        aim = max(self.low + self.step, min(aim, self.high - self.step))
        return max(self.step, min(self.most, aim // self.step * self.step if aim >= self.step else self.step))

    def _aim(self) -> int:
        known = sorted(self.peaks)
        if len(known) < 2:
            size, peak = known[0], self.peaks[known[0]]
            return int(size * max(0, self.budget_bytes - self.floor) / max(1, peak - self.floor))
        if self.low and self.high in self.peaks:
            width = self.high - self.low
            stalled, self.width = 2 * width > self.width > 0, width
            if stalled:
                return (self.low + self.high) // 2
            slope = (self.peaks[self.high] - self.peaks[self.low]) / width
            return self.low + int((self.budget_bytes - self.peaks[self.low]) / slope)
        near, far = (known[-1], known[-2]) if self.low else (known[0], known[1])
        slope = (self.peaks[far] - self.peaks[near]) / (far - near)
        return near + int((self.budget_bytes - self.peaks[near]) / slope) if slope > 0 else 2 * near


def largest(
    peak: Peak, first: Mapping[str, int], budget_bytes: int, step: int, dimension: Dimension, now: int, floor: int = 0
) -> tuple[Largest, ...]:
    """For each plan, the largest size whose peak is within ``budget_bytes``.

    ``first`` gives every plan's peak at the size of ``now``; ``peak(plan, size)`` gives it at others, and raises
    AutockptError where the size cannot be built. Sizes are multiples of ``step``, and ``now`` itself. At most
    ``MOST_RUNS`` are tried per plan. ``floor``: about how many bytes are there at any size.
    """
    found = []
    for name in first:
        search = _Search(budget_bytes, step, max(step, now * MOST_TIMES // step * step), floor)
        search.note(now, first[name])
        for _ in range(MOST_RUNS - 1):
            if search.done or (size := search.guess()) in search.peaks:
                break
            try:
                search.note(size, peak(name, size))
            except AutockptError as error:
                search.refuse(size, error.message.splitlines()[0])
        all_tried = search.done and search.low < search.most
        if search.low:
            why = search.why or ("" if all_tried else f"{search.low} was as far as was tried")
        else:  # the smallest does not fit, or cannot be asked for: a factory makes its own batch
            why = "" if step in search.peaks else search.why
        found.append(
            Largest(
                dimension=dimension,
                plan=name,  # type: ignore[arg-type]
                value=search.low or None,
                peak_bytes=search.peaks.get(search.low),
                now=now,
                open_ended=search.low > 0 and (not all_tried or bool(search.why)),
                why=why,
            )
        )
    return tuple(found)


def workload_limits(
    subject: Subject,
    plans: Mapping[str, Mapping[str, Choice]],
    budget_bytes: int,
    dimensions: Collection[Dimension] = ("batch size", "sequence length"),
) -> tuple[Largest, ...]:
    """The largest batch size and sequence length of a workload under ``budget_bytes``, for each of ``plans``.

    Dimensions that it does not have are left out.
    """
    spec = subject.question.spec
    run = subject.profiled.predictor.graph
    graphs = {name: run(choices) if choices else subject.base for name, choices in plans.items()}
    first = {name: subject.needs(graph) for name, graph in graphs.items()}
    floor = min(first[name] - graph.peak_bytes + _at_any_size(graph) for name, graph in graphs.items())
    out: list[Largest] = []
    for dimension, field_name in FIELDS.items():
        now = subject.tracer.settings.get(field_name)
        padded = field_name == "seq_len" and spec.pad_to is not None
        if dimension not in dimensions or not isinstance(now, int) or padded:
            continue

        def peak(plan: str, size: int, field_name: str = field_name) -> int:
            resized = spec.model_copy(update={field_name: size})
            with subject.question.tracer(resized, fallback=False) as tracer:
                return subject.needs(tracer.trace(plans[plan]))

        out += largest(peak, first, budget_bytes, step_of(dimension, now), dimension, now, floor)
    return tuple(out)


def _at_any_size(graph: Graph) -> int:
    """About the bytes that do not grow with the batch: those after backward, gradients included."""
    phases = [op.phase for op in graph.ops]
    after = phases.index("optimizer") if "optimizer" in phases else len(phases) - 1
    return next(islice(graph.timeline(), after, None), graph.resident_bytes)


def step_of(dimension: Dimension, size: int) -> int:
    """What sizes of about this one are distinguished by."""
    return 1 if dimension == "batch size" else grain(size)


def grain(size: int) -> int:
    """The power of two that sequence lengths are distinguished by."""
    return max(1, 1 << max(0, (size // GRAIN).bit_length() - 1))
