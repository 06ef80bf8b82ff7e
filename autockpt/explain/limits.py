"""The largest batch and the longest sequence that fit, by ghost runs of a few sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autockpt.errors import AutockptError
from autockpt.schema import Choice, Graph, WorkloadSpec
from autockpt.schema.explanation import Dimension, Largest
from autockpt.tracing import Tracer

MOST_RUNS = 7  # sizes tried per plan and dimension
MOST_TIMES = 64  # as large as now is as far as anybody looks
GRAIN = 32  # sequences are told apart to a share of 1/32, in powers of two

Peaks = Callable[[int], Mapping[str, int]]


@dataclass
class _Search:
    """Brackets the largest size that fits: peaks grow with size, and between two readings about linearly."""

    ceiling: int
    step: int
    most: int
    low: int = 0  # fits, or 0
    high: int | None = None  # does not fit, or cannot be built
    peaks: dict[int, int] = field(default_factory=dict)
    why: str = ""

    def note(self, size: int, peak: int) -> None:
        self.peaks[size] = peak
        if peak <= self.ceiling:
            self.low = max(self.low, size)
        else:
            self.high = size if self.high is None else min(self.high, size)

    def refuse(self, size: int, why: str) -> None:
        self.high, self.why = size if self.high is None else min(self.high, size), why

    @property
    def done(self) -> bool:
        """Whether nothing larger is left to try."""
        if self.low >= self.most or (self.high is not None and self.high - self.low <= self.step):
            return True
        return self._next_is_too_large()

    def _next_is_too_large(self) -> bool:
        """Whether the line through the two largest sizes that fit is beyond the ceiling one step on.

        Peaks are convex in the size (a maximum over moments, each growing linearly or faster), so they lie above it.
        """
        fit = sorted(k for k, peak in self.peaks.items() if peak <= self.ceiling)[-2:]
        if len(fit) < 2 or fit[-1] != self.low:
            return False
        slope = (self.peaks[fit[1]] - self.peaks[fit[0]]) / (fit[1] - fit[0])
        return self.peaks[self.low] + slope * self.step > self.ceiling

    def guess(self) -> int:
        """The next size to try: where the line through the nearest readings meets the ceiling, kept within bounds."""
        aim = self._aim()
        high = self.high if self.high is not None else self.most + self.step
        aim = max(self.low + self.step, min(aim, high - self.step))
        return max(self.step, min(self.most, aim // self.step * self.step if aim >= self.step else self.step))

    def _aim(self) -> int:
        known = sorted(self.peaks)
        if len(known) < 2:
            size, peak = known[0], self.peaks[known[0]]
            return 2 * size if peak <= self.ceiling else size // 2
        middle = self.low if self.low in self.peaks else known[0]
        others = [k for k in known if k != middle]
        other = min(others, key=lambda k: (abs(k - middle), k))
        slope = (self.peaks[other] - self.peaks[middle]) / (other - middle)
        if slope <= 0:
            return 2 * max(known)
        aim = middle + int((self.ceiling - self.peaks[middle]) / slope)
        return aim


def largest(peaks: Peaks, now: int, ceiling: int, step: int, dimension: Dimension) -> tuple[Largest, ...]:
    """For each plan that ``peaks`` names, the largest size whose peak is within ``ceiling`` bytes.

    ``peaks(size)`` gives every plan's peak and raises AutockptError where the size cannot be built. Sizes are multiples
    of ``step``, and ``now`` itself. At most ``MOST_RUNS`` sizes are tried per plan; one reading serves all plans.
    """
    known: dict[int, Mapping[str, int] | str] = {}

    def read(size: int) -> Mapping[str, int] | str:
        if size not in known:
            try:
                known[size] = peaks(size)
            except AutockptError as error:
                known[size] = error.message.splitlines()[0]
        return known[size]

    first = read(now)
    if isinstance(first, str):
        return ()
    return tuple(_one(name, read, now, ceiling, step, dimension) for name in first)  # type: ignore[arg-type]


def _one(
    name: str, read: Callable[[int], Mapping[str, int] | str], now: int, ceiling: int, step: int, dimension: Dimension
) -> Largest:
    search = _Search(ceiling, step, most=max(step, now * MOST_TIMES // step * step))
    size, runs = now, 0
    while runs < MOST_RUNS:
        runs += 1
        said = read(size)
        if isinstance(said, str):
            search.refuse(size, said)
        else:
            search.note(size, said[name])
        if search.done or (size := search.guess()) in search.peaks:
            break
    open_ended = search.low >= search.most or bool(search.why and search.high) or not search.done
    why = search.why or ("" if search.done and search.low < search.most else f"{search.low} was as far as was tried")
    return Largest(
        dimension=dimension,
        plan=name,  # type: ignore[arg-type]
        value=search.low or None,
        peak_bytes=search.peaks.get(search.low),
        now=now,
        open_ended=open_ended and bool(search.low),
        why=why,
    )


def workload_limits(
    spec: WorkloadSpec,
    plans: Mapping[str, Mapping[str, Choice]],
    settings: Mapping[str, object],
    ceiling: int,
    open_tracer: Callable[[WorkloadSpec], Tracer],
    needs: Callable[[Graph], int],
) -> tuple[Largest, ...]:
    """The largest batch size and sequence length of a workload under ``ceiling`` bytes, for each of ``plans``.

    ``needs`` says what a ghost run takes of the device.

    ``settings`` are the workload's own, which say how large it is now. Dimensions that it does not have are left out.
    """
    out: list[Largest] = []
    fields: tuple[tuple[Dimension, str, str], ...] = (
        ("batch size", "batch_size", "batch_size"),
        ("sequence length", "seq_len", "seq_len"),
    )
    for dimension, name, setting in fields:
        now = settings.get(setting)
        if not isinstance(now, int) or (name == "seq_len" and spec.pad_to is not None):
            continue

        def peaks(size: int, name: str = name) -> dict[str, int]:
            with open_tracer(spec.model_copy(update={name: size})) as tracer:
                return {plan: needs(tracer.trace(choices)) for plan, choices in plans.items()}

        step = 1 if name == "batch_size" else grain(now)
        out += largest(peaks, now, ceiling, step, dimension)
    return tuple(out)


def grain(size: int) -> int:
    """The power of two that sequence lengths are told apart by."""
    return max(1, 1 << max(0, (size // GRAIN).bit_length() - 1))
