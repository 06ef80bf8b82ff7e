"""What guides and courses say about bytes in general, put to this model: each claim scaled to it, and looked at.

A claim that was made for another model is scaled by what it grows with (layers, width, tokens); where no page could be
named it is called common advice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autockpt.analysis.explain import Subject
from autockpt.analysis.holdings import StepBytes, peak_op
from autockpt.cost.roofline import roofline_times
from autockpt.cost.step import op_seconds, simulate
from autockpt.errors import AutockptError
from autockpt.schema import RECOMPUTE, Choice, Graph, Segment, WorkloadSpec
from autockpt.tracing import Tracer
from autockpt.workload.configs import find_config
from tests.evidence.rules import parts
from tests.evidence.rules.parts import FEED_FORWARD, SCORES, part_namer, tracer_of
from tests.evidence.rules.rule import Reading, Rule

COMMON = "common advice"


def cited(source: str, address: str = "") -> dict[str, Any]:
    """Whose a rule is, as fields of it."""
    return {"source": source, "address": address}


def _amount(
    name: str, says: str, said: tuple[float, float], found: float, whose: Mapping[str, Any] = cited(COMMON), **more: Any
) -> Rule:
    """A rule about an amount: what it says that is for this model, and what is ``found``."""
    return Rule(name=name, says=says, amount=said, predicted=Reading(amount=found), **whose, **more)


SCORES_SOURCE = cited("Korthikanti et al. 2022", "https://arxiv.org/abs/2205.05198")
CHEN = cited("Chen et al. 2016", "https://arxiv.org/abs/1604.06174")
_SEVEN = (32, 4096, 4 * 2048)  # layers, width and tokens of a 7B model at 4 × 2048
_SEVEN_PARAMS, _CARD = 7e9, 24e9
_COURSE_WIDE = 4 * 4096 * 16384 * 2  # 4 × 4096 tokens, 4 × 4096 wide, two bytes


def text_config(spec: WorkloadSpec) -> Any:
    """The model's configuration, as far as it is about text; None where it has none."""
    try:
        return find_config(spec).config.get_text_config()
    except (AutockptError, AttributeError):
        return None


@dataclass(frozen=True)
class Shape:
    """What claims grow with, by the model's configuration and the job's settings."""

    layers: int
    hidden: int
    heads: int
    wide: int
    rows: int
    length: int
    params: int

    @classmethod
    def of(cls, subject: Subject) -> Shape | None:
        """None for what is no transformer on sequences."""
        settings, config = subject.tracer.settings, text_config(subject.question.described)
        hidden, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
        wide = getattr(config, "intermediate_size", None) or (4 * hidden if isinstance(hidden, int) else None)
        rows, length, params = (settings.get(name) for name in ("batch_size", "seq_len", "params"))
        numbers = (len(subject.profiled.blocks), hidden, heads, wide, rows, length, params)
        whole = [n for n in numbers if isinstance(n, int) and n > 0]
        return cls(*whole) if len(whole) == len(numbers) else None

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True)
class Claims:
    """The rows about bytes of one open workload; ``activations`` come and go at the peak of its plain step."""

    subject: Subject
    shape: Shape
    activations: int

    def rows(self) -> Iterator[Rule]:
        """Every claim that this model can answer."""
        yield from self._sizes()
        for group in (self._mixed_precision, self._longer, self._on_one_card):
            with suppress(AutockptError):  # a variant that cannot be traced says nothing
                yield from group()
        yield from self._segments()

    def _sizes(self) -> Iterator[Rule]:
        """Activations of a 7B model, scores beside the feed-forward, and a mistake of arithmetic."""
        shape = self.shape
        scale = shape.layers * shape.hidden * shape.tokens / math.prod(_SEVEN)
        note = f"scaled by layers × width × tokens: × {scale:.3g}"
        for low, high in ((10e9, 20e9), (15e9, 25e9)):
            says = f"7B at 4 × 2048: {low / 1e9:g}–{high / 1e9:g} GB"
            yield _amount("activations", says, (low * scale, high * scale), self.activations, unit="bytes", note=note)
        course = 800e6 * self._wide_bytes / _COURSE_WIDE
        says = "4 × 4096 tokens of a 7B: 800 MB"
        note = "a slip of the source: by its own formula 4 · 4096 · 16384 · 2 B are 537 MB"
        yield _amount("one feed-forward", says, (course, course), self._wide_bytes, unit="bytes", note=note)
        kept = self._largest(self.subject.base)
        if kept[FEED_FORWARD]:
            says = "heads · length : width, 8 : 1 for a 7B at 4096"
            least, most = (factor * shape.heads * shape.length / shape.wide for factor in (0.8, 1.2))
            found = kept[SCORES] / kept[FEED_FORWARD]
            note = self._fused or "the largest tensor of each that is kept"
            yield _amount("scores : feed-forward", says, (least, most), found, SCORES_SOURCE, note=note)

    def _mixed_precision(self) -> Iterator[Rule]:
        """fp32 training against bf16 autocast with everything recomputed."""
        spec = self.subject.question.described.model_copy(update={"dtype": "fp32", "autocast": None, "scaler": False})
        with self._tracer(spec) as plain, self._tracer(spec.model_copy(update={"autocast": "bf16"})) as mixed:
            first, then = plain.trace(), mixed.trace(self._recomputed(mixed))
        overhead = self.subject.profiled.predictor.device.overhead_bytes
        seconds = self._seconds((first, then))
        yield Rule(
            name="AMP and recompute all",
            source=COMMON,
            says="60 % less memory, 10 % slower, than fp32",
            memory=(0.6, 0.6),
            of="peak",
            time=(0.05, 0.10),
            predicted=Reading(
                peak_saved=1 - (then.peak_bytes + overhead) / (first.peak_bytes + overhead),
                time_added=seconds[1] / seconds[0] - 1 if seconds else None,
            ),
            note="" if seconds else "seconds of another type are known for --hardware alone",
        )

    def _longer(self) -> Iterator[Rule]:
        """Twice the sequence in the same bytes; how scores grow with it."""
        double = 2 * self.shape.length
        spec = self.subject.question.described.model_copy(update={"seq_len": double})
        with self._tracer(spec) as tracer:
            if tracer.settings.get("seq_len") != double:
                return
            plain, full = tracer.trace(), tracer.trace(self._recomputed(tracer))
        base = self.subject.base
        says = "fits where plain training did"
        yield _amount("recompute all, twice the length", says, (0.0, 1.0), full.peak_bytes / base.peak_bytes)
        once, twice = self._largest(base)[SCORES], self._largest(plain)[SCORES]
        if once:
            name, says = "scores, twice the length", "4 times as much: they grow with the square"
            yield _amount(name, says, (3.6, 4.4), twice / once, SCORES_SOURCE, note=self._fused)

    def _on_one_card(self) -> Iterator[Rule]:
        """bf16, recompute and accumulation on 24 GB, per parameter."""
        update = {"dtype": "bf16", "autocast": None, "scaler": False, "batch_size": 1, "accumulate": 2}
        with self._tracer(self.subject.question.described.model_copy(update=update)) as tracer:
            graph = tracer.trace(self._recomputed(tracer))
        room = _CARD * self.shape.params / _SEVEN_PARAMS
        held = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in graph.resident.items() if size > 0.01 * room)
        name, note = "bf16, recompute, accumulation", f"scaled by parameters, single rows: {held}"
        yield _amount(name, "fit 7B in 24 GB", (0.0, room), graph.peak_bytes, unit="bytes", note=note)

    def _segments(self) -> Iterator[Rule]:
        """Which length of segments peaks lowest."""
        layers, blocks = self.shape.layers, [u.name for u in self.subject.base.blocks()]
        root = round(math.sqrt(layers))
        sizes = sorted({1, 2, max(1, root // 2), root, min(2 * root, layers)})
        peaks: dict[int, int] = {}
        with suppress(AutockptError):
            for size in sizes:
                peaks[size] = self.subject.tracer.trace(dict.fromkeys(blocks, Segment(size=size))).peak_bytes
        if layers < 4 or len(peaks) < len(sizes):
            return
        best = min(peaks, key=lambda size: (peaks[size], abs(size - root)))
        says = f"√L: {root} of {layers} (6 of 32, 10 of 96)"
        note = f"of {', '.join(map(str, sizes))}: the least peak of a whole step"
        near = (root - 0.5, root + 0.5)
        yield _amount("best length of segments", says, near, best, CHEN, unit="layers", note=note)

    @cached_property
    def _wide_bytes(self) -> int:
        """One tensor of a feed-forward's width."""
        settings = self.subject.tracer.settings
        half = (settings.get("autocast") or settings.get("dtype")) in ("bf16", "fp16")
        return self.shape.tokens * self.shape.wide * (2 if half else 4)

    @property
    def _fused(self) -> str:
        attention = self.subject.tracer.settings.get("attention")
        return "" if attention == "eager" else f"{attention} keeps no scores, so recomputing them frees nothing"

    def _largest(self, graph: Graph) -> Counter[str]:
        """Bytes of the largest tensor kept for backward at the peak of a plain step, by part of a layer."""
        held, part_of = StepBytes(graph, self.subject.head), part_namer(graph)
        made: Counter[str] = Counter()
        for storage in (s for s in held.own if s.alive_at(peak_op(graph))):
            if (op := held.makers.get(storage.id)) is not None and op.phase == "forward":
                made[part_of(op)] = max(made[part_of(op)], storage.bytes)
        return made

    def _seconds(self, graphs: Sequence[Graph]) -> list[float] | None:
        """Of whole steps on described hardware."""
        hardware = self.subject.question.hardware
        if hardware is None:
            return None
        times = roofline_times(hardware, graphs)
        return [simulate(graph, times).step_seconds for graph in graphs]

    def _tracer(self, spec: WorkloadSpec) -> Tracer:
        return tracer_of(self.subject, spec)

    def _recomputed(self, tracer: Tracer) -> Mapping[str, Choice]:
        return {unit.name: RECOMPUTE for unit in tracer.units if unit.role == "block"}


def claims(subject: Subject, activations: int) -> list[Rule]:
    """What courses say about bytes, for this model. Empty for what is no transformer on sequences."""
    shape = Shape.of(subject)
    return [] if shape is None else list(Claims(subject, shape, activations).rows())


def bound_by(subject: Subject) -> str | None:
    """What most of a plain step's seconds are bound by on described hardware; None elsewhere."""
    hardware = subject.question.hardware
    if hardware is None:
        return None
    seconds = op_seconds(subject.base, subject.profiled.profile.op_times) * subject.base.runs
    return parts.bound_by(hardware, subject.base, seconds.tolist())
