"""Test the rules of thumb about recompute and offload on one model: ghost runs of the plans that they speak of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress

from autockpt.analysis.explain import ExplainRequest, Subject, open_subject
from autockpt.analysis.holdings import COME_AND_GO, StepBytes
from autockpt.cost.step import simulate
from autockpt.errors import AutockptError, ConflictError
from autockpt.schema import OFFLOAD, RECOMPUTE, Choice, Graph, Segment, Selective, Silence, Unit, words
from tests.evidence.rules.claims import CHEN, COMMON, KORTHIKANTI, bound_by, claims, recomputed, text_config, tracer_of
from tests.evidence.rules.rule import Range, Rule, Rules, Source

PLAIN, FULL, ROOT, ATTENTION, OFFLOADED = "plain", "recompute all", "√n segments", "attention only", "offload all"
SECOND, FOURTH, MATRICES = "every 2nd layer", "segments of 4", "products kept"
LORA_RANK = 16  # where the workload has no adapters of its own
FLOPS_TOLERANCE = 0.05
_DEEPSPEED = Source("DeepSpeed-Chat's throughput formula", "https://github.com/deepspeedai/DeepSpeedExamples")
_DEEPSPEED_DOCS = Source("DeepSpeed", "https://www.deepspeed.ai")
_GUIDE = Source("transformers' guide", "https://huggingface.co/docs/transformers/perf_train_gpu_one")
_GLOSSARY = Source("compute-market's glossary", "https://www.compute-market.com/glossary/gradient-checkpointing")


def rules(question: ExplainRequest) -> Rules:
    """Each rule with what it says, and what ghost runs and op times predict.

    A plan that the model refuses leaves its rules open.
    """
    with open_subject(question, Silence()) as subject:
        base = subject.base
        graphs = {PLAIN: base}
        for name, choices in _plans(base.units).items():
            with suppress(ConflictError):
                graphs[name] = subject.tracer.trace(choices)
        held = StepBytes(base, subject.head).holdings()
        activations = sum(h.peak_bytes for h in held if h.name in COME_AND_GO)  # what the rules mean by memory
        peak = base.peak_bytes + subject.profiled.predictor.device.overhead_bytes  # rules speak of what tensors hold
        times = subject.profiled.profile.op_times
        plain_seconds = simulate(base, times).step_seconds
        found = {
            name: {
                "peak": (base.peak_bytes - graph.peak_bytes) / peak,
                "activations": (base.peak_bytes - graph.peak_bytes) / activations,
                "time": simulate(graph, times).step_seconds / plain_seconds - 1,
            }
            for name, graph in graphs.items()
        }
        settings = {name: value for name, value in subject.tracer.settings.items() if name != "model"}
        return Rules(
            heading=f"{question.described.model} on {subject.profiled.predictor.device.name}",
            job=words.job(settings),
            basis=subject.basis[1],
            save_all_peak=peak,
            activation_bytes=activations,
            rules=(*_flops_rules(subject, graphs), *_memory_rules(subject, found), *claims(subject, activations)),
            notes=subject.notes,
        )


def _plans(units: tuple[Unit, ...]) -> dict[str, dict[str, Choice]]:
    """The plans that the rules speak of, by name; those that a model has no units for are left out."""
    blocks = [u.name for u in units if u.role == "block"]
    attention = [u.name for u in units if u.role == "attention"]
    plans: dict[str, dict[str, Choice]] = {
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


def forwards(graph: Graph, plain: Graph) -> float:
    """FLOPs of a whole step, in forwards of plain training."""
    return sum(op.flops for op in graph.ops) / sum(op.flops for op in plain.ops if op.phase == "forward")


def _flops_rules(subject: Subject, graphs: Mapping[str, Graph]) -> list[Rule]:
    """The factors of DeepSpeed-Chat: 3 forwards' worth a step, 4 with recompute; LoRA takes 1 − 2r/h off either."""
    spec, plain, full = subject.question.described, graphs[PLAIN], graphs.get(FULL)
    hidden = getattr(text_config(spec), "hidden_size", None)
    if spec.lora is not None:
        return _with_adapters(spec.lora, hidden, plain, full) if hidden else []
    found = [_flops_rule("plain step", "3", 3, plain, plain), _flops_rule("recompute all", "4", 4, full, plain)]
    if not hidden:
        return found
    with suppress(AutockptError), tracer_of(subject, lora=LORA_RANK) as tracer:  # where it takes adapters
        found += _with_adapters(LORA_RANK, hidden, tracer.trace(), tracer.trace(recomputed(tracer)))
    return found


def _with_adapters(rank: int, hidden: int, plain: Graph, full: Graph | None) -> list[Rule]:
    off, rules = 1 - 2 * rank / hidden, []
    for name, factor, graph in (("plain step", 3, plain), ("recompute all", 4, full)):
        says = f"{factor} − (1 − 2·{rank}/{hidden}) = {factor - off:.2f}"
        rules.append(_flops_rule(f"{name}, LoRA r={rank}", says, factor - off, graph, plain))
    return rules


def _flops_rule(name: str, says: str, factor: float, graph: Graph | None, plain: Graph) -> Rule:
    near = ((1 - FLOPS_TOLERANCE) * factor, (1 + FLOPS_TOLERANCE) * factor)
    found = {} if graph is None else {"forwards": forwards(graph, plain)}
    return Rule(name, _DEEPSPEED, f"FLOPs of {says} forwards", {"forwards": near}, found)


def _memory_rules(subject: Subject, found: Mapping[str, Mapping[str, float]]) -> list[Rule]:
    """Rules about bytes and seconds of a plan; a single number of memory stands for five points around it."""
    layers, bound = len(subject.profiled.blocks), bound_by(subject)
    root = 1 - math.sqrt(layers) / layers
    roots = (max(0.0, root - 0.05), min(1.0, root + 0.05))
    slower = {"arithmetic": (0.25, 0.30), "bandwidth": (0.40, 0.50)}.get(bound or "", (0.25, 0.50))
    kind = f", {bound} here" if bound in ("arithmetic", "bandwidth") else ""

    def said(plan: str, source: Source, says: str, **promised: Range) -> Rule:
        known = {what: value for what, value in found.get(plan, {}).items() if what in (*promised, "time")}
        return Rule(plan, source, says, promised, known, "" if known else "not for this model")

    return [
        said(FULL, _DEEPSPEED_DOCS, "30–50 % less memory, +33 % time", peak=(0.30, 0.50), time=(0.28, 0.38)),
        said(FULL, _GUIDE, "50 % less memory, 20 % slower", peak=(0.45, 0.55), time=(0.15, 0.25)),
        said(FULL, _GLOSSARY, "60–80 % less memory, 20–30 % slower", peak=(0.60, 0.80), time=(0.20, 0.30)),
        said(FULL, COMMON, "80 % of activations, 20–40 % slower", activations=(0.75, 0.85), time=(0.20, 0.40)),
        said(FULL, COMMON, "13B from 35 to 15 GB: 57 % less memory", peak=(0.57, 0.57)),
        said(FULL, COMMON, f"bound by arithmetic 25–30 % slower, by bandwidth 40–50 %{kind}", time=slower),
        said(ROOT, CHEN, f"√{layers} of {layers} layers' memory, +33 % time", activations=roots, time=(0.28, 0.38)),
        said(FOURTH, COMMON, "a quarter of activations, 19 % slower", activations=(0.75, 0.75), time=(0.15, 0.19)),
        said(SECOND, COMMON, "every n-th layer: 75 % of the speed", time=(0.0, 1 / 0.75 - 1)),
        said(
            MATRICES, COMMON, "selective keeps 40–60 % of activations, 10 % slower",
            activations=(0.40, 0.60), time=(0.05, 0.10),
        ),
        said(ATTENTION, COMMON, "60–75 % of activations, 10–15 % slower", activations=(0.60, 0.75), time=(0.10, 0.15)),
        said(ATTENTION, KORTHIKANTI, "70 % of activations, 2.7 % more work", activations=(0.65, 0.75), time=(0, 0.04)),
        said(OFFLOADED, COMMON, "80–90 % of activations, at link speed", activations=(0.80, 0.90)),
    ]  # fmt: skip
