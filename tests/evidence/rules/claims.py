"""What guides and courses say about bytes in general, put to this model: each claim scaled to it, and looked at.

A claim that was made for another model is scaled by what it grows with (layers, width, tokens); where no page could be
named it is called common advice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from autockpt.analysis.explain import Subject
from autockpt.analysis.holdings import StepBytes, peak_op
from autockpt.cost.roofline import roofline_times, seconds_of_work
from autockpt.cost.step import base_name, op_seconds, simulate
from autockpt.cost.work import Work, work_of_op
from autockpt.errors import AutockptError
from autockpt.schema import RECOMPUTE, Choice, Graph, Hardware, Op, Segment, WorkloadSpec
from autockpt.schema.names import ancestors
from autockpt.tracing import Tracer
from autockpt.workload.configs import find_config
from tests.evidence.rules.rule import Rule, Source

COMMON = Source("common advice")
KORTHIKANTI = Source("Korthikanti et al. 2022", "https://arxiv.org/abs/2205.05198")
CHEN = Source("Chen et al. 2016", "https://arxiv.org/abs/1604.06174")
SCORES, FEED_FORWARD = "attention itself", "feed-forward"
_OF_SCORES = ("bmm", "baddbmm", "matmul", "_softmax", "softmax", "_safe_softmax", "_softmax_backward_data")
_SEVEN = (32, 4096, 4 * 2048)  # layers, width and tokens of a 7B model at 4 × 2048
_SEVEN_PARAMS, _CARD = 7e9, 24e9
_COURSE_WIDE = 4 * 4096 * 16384 * 2  # 4 × 4096 tokens, 4 × 4096 wide, two bytes


def hardware_of(subject: Subject) -> Hardware:
    """The card of the question."""
    assert subject.question.hardware is not None
    return subject.question.hardware


def tracer_of(subject: Subject, **changes: Any) -> Tracer:
    """A tracer of the subject's workload with some settings changed, for its hardware. Ghost runs alone."""
    spec = subject.question.described.model_copy(update=changes)
    return Tracer.from_spec(spec, hardware=hardware_of(subject), fallback=False)


def recomputed(tracer: Tracer) -> dict[str, Choice]:
    """Everything recomputed."""
    return {unit.name: RECOMPUTE for unit in tracer.units if unit.role == "block"}


def text_config(spec: WorkloadSpec) -> Any:
    """The model's configuration, as far as it is about text; None where it has none."""
    try:
        return find_config(spec).config.get_text_config()
    except (AutockptError, AttributeError):
        return None


def claims(subject: Subject, activations: int) -> list[Rule]:
    """What courses say about bytes, for this model. Empty for what is no transformer on sequences."""
    shape = _shape(subject)
    if shape is None:
        return []
    about = Claims(subject, shape, activations)
    found = list(about.sizes())
    for group in (about.mixed_precision, about.longer, about.on_one_card):
        with suppress(AutockptError):  # a variant that cannot be traced says nothing
            found += group()
    return [*found, *about.segments()]


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


def _shape(subject: Subject) -> Shape | None:
    settings, config = subject.tracer.settings, text_config(subject.question.described)
    hidden, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
    wide = getattr(config, "intermediate_size", None) or (4 * hidden if isinstance(hidden, int) else None)
    rows, length, params = (settings.get(name) for name in ("batch_size", "seq_len", "params"))
    numbers = (len(subject.profiled.blocks), hidden, heads, wide, rows, length, params)
    whole = [n for n in numbers if isinstance(n, int) and n > 0]
    return Shape(*whole) if len(whole) == len(numbers) else None


@dataclass(frozen=True)
class Claims:
    """The rows about bytes of one open workload; ``activations`` come and go at the peak of its plain step."""

    subject: Subject
    shape: Shape
    activations: int

    def sizes(self) -> Iterator[Rule]:
        """Activations of a 7B model, scores beside the feed-forward, and a mistake of arithmetic."""
        shape, settings = self.shape, self.subject.tracer.settings
        tokens = shape.rows * shape.length
        scale = shape.layers * shape.hidden * tokens / math.prod(_SEVEN)
        note, found = f"scaled by layers × width × tokens: × {scale:.3g}", {"bytes": self.activations}
        for low, high in ((10e9, 20e9), (15e9, 25e9)):
            says, promised = f"7B at 4 × 2048: {low / 1e9:g}–{high / 1e9:g} GB", {"bytes": (low * scale, high * scale)}
            yield Rule("activations", COMMON, says, promised, found, note)
        half = (settings.get("autocast") or settings.get("dtype")) in ("bf16", "fp16")
        wide = tokens * shape.wide * (2 if half else 4)
        course = 800e6 * wide / _COURSE_WIDE
        says = "4 × 4096 tokens of a 7B: 800 MB"
        note = "a slip of the source: by its own formula 4 · 4096 · 16384 · 2 B are 537 MB"
        yield Rule("one feed-forward", COMMON, says, {"bytes": (course, course)}, {"bytes": wide}, note)
        kept = self._largest(self.subject.base)
        if kept[FEED_FORWARD]:
            says = "heads · length : width, 8 : 1 for a 7B at 4096"
            ratio, found = shape.heads * shape.length / shape.wide, {"times": kept[SCORES] / kept[FEED_FORWARD]}
            note = self._fused or "the largest tensor of each that is kept"
            yield Rule("scores : feed-forward", KORTHIKANTI, says, {"times": (0.8 * ratio, 1.2 * ratio)}, found, note)

    def mixed_precision(self) -> Iterator[Rule]:
        """fp32 training against bf16 autocast with everything recomputed."""
        plain = {"dtype": "fp32", "autocast": None, "scaler": False}
        with tracer_of(self.subject, **plain) as first, tracer_of(self.subject, **plain | {"autocast": "bf16"}) as then:
            graphs = first.trace(), then.trace(recomputed(then))
        overhead = self.subject.profiled.predictor.device.overhead_bytes
        times = roofline_times(hardware_of(self.subject), graphs)
        before, after = (graph.peak_bytes + overhead for graph in graphs)
        slow, fast = (simulate(graph, times).step_seconds for graph in graphs)
        says, promised = "60 % less memory, 10 % slower, than fp32", {"peak": (0.6, 0.6), "time": (0.05, 0.10)}
        found = {"peak": 1 - after / before, "time": fast / slow - 1}
        yield Rule("AMP and recompute all", COMMON, says, promised, found)

    def longer(self) -> Iterator[Rule]:
        """Twice the sequence in the same bytes; how scores grow with it."""
        double, base = 2 * self.shape.length, self.subject.base
        with tracer_of(self.subject, seq_len=double) as tracer:
            if tracer.settings.get("seq_len") != double:
                return
            plain, full = tracer.trace(), tracer.trace(recomputed(tracer))
        says, found = "fits where plain training did", {"times": full.peak_bytes / base.peak_bytes}
        yield Rule("recompute all, twice the length", COMMON, says, {"times": (0.0, 1.0)}, found)
        once, twice = self._largest(base)[SCORES], self._largest(plain)[SCORES]
        if once:
            says, found = "4 times as much: they grow with the square", {"times": twice / once}
            yield Rule("scores, twice the length", KORTHIKANTI, says, {"times": (3.6, 4.4)}, found, self._fused)

    def on_one_card(self) -> Iterator[Rule]:
        """bf16, recompute and accumulation on 24 GB, per parameter."""
        changes = {"dtype": "bf16", "autocast": None, "scaler": False, "batch_size": 1, "accumulate": 2}
        with tracer_of(self.subject, **changes) as tracer:
            graph = tracer.trace(recomputed(tracer))
        room = _CARD * self.shape.params / _SEVEN_PARAMS
        held = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in graph.resident.items() if size > 0.01 * room)
        name, note = "bf16, recompute, accumulation", f"scaled by parameters, single rows: {held}"
        yield Rule(name, COMMON, "fit 7B in 24 GB", {"bytes": (0.0, room)}, {"bytes": graph.peak_bytes}, note)

    def segments(self) -> Iterator[Rule]:
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
        yield Rule("best length of segments", CHEN, says, {"layers": (root - 0.5, root + 0.5)}, {"layers": best}, note)

    @property
    def _fused(self) -> str:
        attention = self.subject.tracer.settings.get("attention")
        return "" if attention == "eager" else f"{attention} keeps no scores, so recomputing them frees nothing"

    def _largest(self, graph: Graph) -> Counter[str]:
        """Bytes of the largest tensor kept for backward at the peak of a plain step, by part of a layer."""
        held, roles = StepBytes(graph, self.subject.head), {unit.name: unit.role for unit in graph.units}
        made: Counter[str] = Counter()
        for storage in (s for s in held.own if s.alive_at(peak_op(graph))):
            if (op := held.makers.get(storage.id)) is not None and op.phase == "forward":
                around = (roles.get(module, "") for module in (op.module, *ancestors(op.module)))
                part = _part(op, next((role for role in around if role in ("attention", "mlp")), ""))
                made[part] = max(made[part], storage.bytes)
        return made


def _part(op: Op, role: str) -> str:
    """What of a layer an op belongs to; ``role`` is that of the innermost unit around it."""
    if "attention" in op.target or (role == "attention" and base_name(op.target) in _OF_SCORES):
        return SCORES
    return FEED_FORWARD if role == "mlp" else ""


def bound_by(subject: Subject) -> str | None:
    """What most of a plain step's seconds are bound by: launches, arithmetic or bandwidth."""
    graph, spent = subject.base, Counter[str]()
    seconds = op_seconds(graph, subject.profiled.profile.op_times) * graph.runs
    for op, took in zip(graph.ops, seconds.tolist(), strict=True):
        work = work_of_op(op, graph.signatures[op.signature])
        if op.phase != "optimizer" and work.kind != "none":
            spent[_bound(hardware_of(subject), work, took)] += round(1e9 * took)
    return spent.most_common(1)[0][0] if spent else None


def _bound(hardware: Hardware, work: Work, took: float) -> str:
    alone = seconds_of_work(hardware, work)
    if took > 1.5 * alone:
        return "launches"
    endless = hardware.model_copy(update={"bandwidth": 1e18, "cache_bandwidth": None})
    return "bandwidth" if seconds_of_work(endless, work) < alone else "arithmetic"
