"""Test the rules of thumb about recompute and offload on one model: ghost runs of the plans that they speak of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from autockpt.analysis.explain import ExplainRequest, Subject, open_subject
from autockpt.analysis.holdings import COME_AND_GO, StepBytes
from autockpt.cost.step import simulate
from autockpt.errors import AutockptError, ConflictError
from autockpt.schema import OFFLOAD, RECOMPUTE, Choice, Graph, Segment, Selective, Silence, Unit, WorkloadSpec
from tests.evidence.rules.claims import CHEN, COMMON, SCORES_SOURCE, bound_by, cited, claims, text_config
from tests.evidence.rules.parts import tracer_of
from tests.evidence.rules.rule import Reading, Rule, Rules

PLAIN, FULL, ROOT, ATTENTION, OFFLOADED = "plain", "recompute all", "√n segments", "attention only", "offload all"
SECOND, FOURTH, MATRICES = "every 2nd layer", "segments of 4", "products kept"
LORA_RANK = 16  # where the workload has no adapters of its own
_DEEPSPEED = cited("DeepSpeed-Chat's throughput formula", "https://github.com/deepspeedai/DeepSpeedExamples")
_DEEPSPEED_DOCS = cited("DeepSpeed", "https://www.deepspeed.ai")
_GUIDE = cited("transformers' guide", "https://huggingface.co/docs/transformers/perf_train_gpu_one")
_GLOSSARY = cited("compute-market's glossary", "https://www.compute-market.com/glossary/gradient-checkpointing")
Plans = dict[str, dict[str, Choice]]


def rules(question: ExplainRequest) -> Rules:
    """Each rule with what it says, and what ghost runs and op times predict.

    A plan that the model refuses leaves its rules open.
    """
    with open_subject(question, Silence()) as subject:
        plans = _plans(subject.base.units)
        graphs = _graphs(subject, plans)
        base = subject.base
        held = StepBytes(base, subject.head).holdings()
        activations = sum(h.peak_bytes for h in held if h.name in COME_AND_GO)  # what the rules mean by memory
        overhead = subject.profiled.predictor.device.overhead_bytes  # rules speak of what tensors hold
        peak = base.peak_bytes + overhead
        seconds = {
            name: simulate(graph, subject.profiled.profile.op_times).step_seconds for name, graph in graphs.items()
        }
        ratios = {name: took / seconds[PLAIN] if seconds[PLAIN] else None for name, took in seconds.items()}
        peaks = {name: graph.peak_bytes + overhead for name, graph in graphs.items()}
        predicted = {name: _reading(peaks[name], peak, activations, ratios[name]) for name in graphs}
        tables = [*_flops_rules(subject, graphs), *_memory_rules(subject, predicted), *claims(subject, activations)]
        return Rules(
            model=question.described.model,
            settings={k: v for k, v in subject.tracer.settings.items() if k != "model"},
            device=subject.profiled.predictor.device.name,
            basis_note=subject.basis[1],
            save_all_peak=peak,
            activation_bytes=activations,
            rules=tuple(tables),
            notes=subject.notes,
        )


def _plans(units: tuple[Unit, ...]) -> Plans:
    """The plans that the rules speak of, by name; those that a model has no units for are left out."""
    blocks = [u.name for u in units if u.role == "block"]
    attention = [u.name for u in units if u.role == "attention"]
    plans: Plans = {
        PLAIN: {},
        FULL: dict.fromkeys(blocks, RECOMPUTE),
        ROOT: dict.fromkeys(blocks, Segment(size=max(1, round(math.sqrt(len(blocks)))))),
        OFFLOADED: dict.fromkeys(blocks, OFFLOAD),
        SECOND: dict.fromkeys(blocks[::2], RECOMPUTE),
        MATRICES: dict.fromkeys(blocks, Selective()),
        FOURTH: dict.fromkeys(blocks, Segment(size=4)),
    }
    if attention:
        plans[ATTENTION] = dict.fromkeys(attention, RECOMPUTE)
    return plans


def _graphs(subject: Subject, plans: Plans) -> dict[str, Graph]:
    found = {PLAIN: subject.base}
    for name, choices in plans.items():
        with suppress(ConflictError):
            if name not in found:
                found[name] = subject.tracer.trace(choices)
    return found


def _reading(peak: int, plain: int, activations: int, ratio: float | None) -> Reading:
    """What a plan saves of the ``plain`` peak and of its ``activations``; ``ratio`` is of step times."""
    saved = plain - peak
    return Reading(
        peak_saved=saved / plain,
        activations_saved=saved / activations if activations else None,
        time_added=None if ratio is None else ratio - 1,
    )


def forwards(graph: Graph, plain: Graph) -> float | None:
    """FLOPs of a whole step, in forwards of plain training; None where ops have none."""
    forward = sum(op.flops for op in plain.ops if op.phase == "forward")
    return sum(op.flops for op in graph.ops) / forward if forward else None


def _flops_rules(subject: Subject, graphs: Mapping[str, Graph]) -> list[Rule]:
    """The factors of DeepSpeed-Chat: 3 forwards' worth a step, 4 with recompute; LoRA takes 1 − 2r/h off either."""
    spec, hidden = subject.question.described, hidden_size(subject.question.described)
    plain, full = graphs[PLAIN], graphs.get(FULL)
    if spec.lora is not None:
        return [] if hidden is None else _pair(spec.lora, hidden, plain, full)
    found = [_flops_rule("plain step", 3, plain, plain), _flops_rule("recompute all", 4, full, plain)]
    with suppress(AutockptError):  # the same of this model with adapters, where it takes them
        if hidden is not None:
            adapted = spec.model_copy(update={"lora": LORA_RANK})
            with tracer_of(subject, adapted) as tracer:
                blocks = [u.name for u in tracer.units if u.role == "block"]
                found += _pair(LORA_RANK, hidden, tracer.trace(), tracer.trace(dict.fromkeys(blocks, RECOMPUTE)))
    return found


def _pair(rank: int, hidden: int, plain: Graph, full: Graph | None) -> list[Rule]:
    off = 1 - 2 * rank / hidden
    return [
        _flops_rule(f"plain step, LoRA r={rank}", 3 - off, plain, plain, f"3 − (1 − 2·{rank}/{hidden})"),
        _flops_rule(f"recompute all, LoRA r={rank}", 4 - off, full, plain, f"4 − (1 − 2·{rank}/{hidden})"),
    ]


def _flops_rule(name: str, factor: float, graph: Graph | None, plain: Graph, formula: str = "") -> Rule:
    said = f"FLOPs of {formula} = {factor:.2f} forwards" if formula else f"FLOPs of {factor:g} forwards"
    counted = Reading(factor=forwards(graph, plain)) if graph is not None else None
    return Rule(name=name, says=said, factor=factor, predicted=counted, **_DEEPSPEED)


def hidden_size(spec: WorkloadSpec) -> int | None:
    """Width of the model's layers by its configuration; None where it has none."""
    found = getattr(text_config(spec), "hidden_size", None)
    return found if isinstance(found, int) else None


def _memory_rules(subject: Subject, predicted: Mapping[str, Reading]) -> list[Rule]:
    """Whoever says something about bytes and seconds of a plan; a single number of memory stands for five points
    around it."""
    layers, bound = len(subject.profiled.blocks), bound_by(subject)
    root = 1 - math.sqrt(layers) / layers
    roots = (max(0.0, root - 0.05), min(1.0, root + 0.05))
    slower = {"arithmetic": (0.25, 0.30), "bandwidth": (0.40, 0.50)}.get(bound or "", (0.25, 0.50))
    kind = f", {bound} here" if bound in ("arithmetic", "bandwidth") else ""
    common, peak, kept = cited(COMMON), "peak", "selective keeps 40–60 %"

    def said(plan: str, whose: Mapping[str, Any], says: str, **promised: Any) -> Rule:
        note = "" if plan in predicted else "not for this model"
        return Rule(name=plan, says=says, predicted=predicted.get(plan), note=note, **whose, **promised)

    return [
        said(FULL, _DEEPSPEED_DOCS, "30–50 % less memory, +33 % time", memory=(0.30, 0.50), of=peak, time=(0.28, 0.38)),
        said(FULL, _GUIDE, "50 % less memory, 20 % slower", memory=(0.45, 0.55), of=peak, time=(0.15, 0.25)),
        said(FULL, _GLOSSARY, "60–80 % less memory, 20–30 % slower", memory=(0.60, 0.80), of=peak, time=(0.20, 0.30)),
        said(FULL, common, "80 % of activations, 20–40 % slower", memory=(0.75, 0.85), time=(0.20, 0.40)),
        said(FULL, common, "13B from 35 to 15 GB: 57 % less memory", memory=(0.57, 0.57), of=peak),
        said(FULL, common, f"bound by arithmetic 25–30 % slower, by bandwidth 40–50 %{kind}", time=slower),
        said(ROOT, CHEN, f"√{layers} of {layers} layers' memory, +33 % time", memory=roots, time=(0.28, 0.38)),
        said(FOURTH, common, "a quarter of activations, 19 % slower", memory=(0.75, 0.75), time=(0.15, 0.19)),
        said(SECOND, common, "every n-th layer: 75 % of the speed", time=(0.0, 1 / 0.75 - 1)),
        said(MATRICES, common, f"{kept} of activations, 10 % slower", memory=(0.40, 0.60), time=(0.05, 0.10)),
        said(ATTENTION, common, "60–75 % of activations, 10–15 % slower", memory=(0.60, 0.75), time=(0.10, 0.15)),
        said(ATTENTION, SCORES_SOURCE, "70 % of activations, 2.7 % more work", memory=(0.65, 0.75), time=(0.0, 0.04)),
        said(OFFLOADED, common, "80–90 % of activations, at link speed", memory=(0.80, 0.90)),
    ]
