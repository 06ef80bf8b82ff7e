"""What others measured on GPUs and published, next to what a simulation of that card says about the same job.

    OMP_NUM_THREADS=1 python -m tests.evidence.published [FILE]

Reads ``results/published_gpu_202611/measurements.yaml``: jobs with the card, how layers keep their activations, what
was measured and where it was published. Each job is ghost-run and priced by the roofline of its card. Nothing of what
was measured enters but the host's time per op of four cards, which was fitted to the jobs marked so. Prints Markdown:
bytes, how much headroom would have covered them, seconds, and what recomputing every layer cost next to the same job
without.

This is no measurement of ours: software of other versions ran, and each row says what is not known of it. Where
another implementation of the same architecture was measured, bytes are not comparable to the percent.
"""

import json
import re
import statistics
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
import yaml
from pydantic import BaseModel, ConfigDict

from autockpt.cost import simulated_memory
from autockpt.cost.predictor import SAFETY
from autockpt.cost.roofline import roofline_times
from autockpt.cost.step import simulate
from autockpt.schema import Choice, WorkloadSpec, parse_choice
from autockpt.shipped import load_hardware
from autockpt.tracing import Tracer
from autockpt.workload import Step, build
from tests.evidence.tables import table

FILE = Path("results/published_gpu_202611/measurements.yaml")
GIB = 1 << 30

Kind = Literal["tensors", "reserved", "device"]
KINDS = {"tensors": "tensors (max_memory_allocated)", "reserved": "reserved", "device": "whole device (NVML)"}


class Job(BaseModel):
    """A published measurement. ``config`` are fields of a config.json, where no built-in shape has them.

    ``choice`` is every layer's, ``head`` the output head's. ``gib`` are of the ``kind`` that was read; ``seconds``
    those of a step, or ``without_optimizer`` of forward and backward alone. ``fitted``: the card's description was
    fitted to these seconds. ``own`` says whether transformers' own model ran; ``baseline`` is the job that differs in
    ``choice`` alone; ``unknown`` is what may differ from what is simulated.
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    what: str
    card: str
    workload: dict[str, Any]
    config: dict[str, Any] | None = None
    choice: Literal["save", "recompute"] = "save"
    head: str | None = None
    own: bool = True
    kind: Kind = "tensors"
    gib: float | None = None
    seconds: float | None = None
    without_optimizer: bool = False
    fitted: bool = False
    baseline: str | None = None
    source: str
    unknown: str = ""


class Predicted(NamedTuple):
    """The same figures, simulated: bytes by kind, and seconds with and without the optimizer."""

    bytes: dict[Kind, int]
    step: float
    optimizer: float

    def seconds(self, job: Job) -> float:
        return self.step - self.optimizer * job.without_optimizer


def predict(job: Job, folder: Path) -> Predicted:
    """Simulate a job: its ghost run's bytes, and its ops on the roofline of its card."""
    hardware, workload = load_hardware(job.card), dict(job.workload)
    if job.config is not None:
        path = folder / f"{job.id}.json"
        path.write_text(json.dumps(job.config))
        workload["model"] = str(path)
    spec = WorkloadSpec.model_validate(workload)
    with Tracer.from_spec(spec, hardware=hardware) as tracer:
        choices: dict[str, Choice] = {u.name: parse_choice(job.choice) for u in tracer.units if u.role == "block"}
        if job.head is not None:
            assert tracer.head is not None, f"{job.id} has no output head"
            choices[tracer.head.name] = parse_choice(job.head)
        graph = tracer.trace(choices)
    whole, times = replace(simulated_memory(hardware), safety=0.0)(graph), roofline_times(hardware, [graph])
    return Predicted(
        bytes={"tensors": graph.peak_bytes, "reserved": whole - hardware.context_bytes, "device": whole},
        step=simulate(graph, times).step_seconds,
        optimizer=times.optimizer_seconds,
    )


def bert_large(batch_size: int, micro_batches: int = 1, autocast: str | None = None) -> Step:
    """Classification at 512 tokens; AdamW goes from parameter to parameter, as transformers' own did in 2022."""
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    config._attn_implementation = "eager"
    model = transformers.BertForSequenceClassification(config).train()
    ids = torch.randint(config.vocab_size, (batch_size, 512))
    batch = {"input_ids": ids, "labels": torch.zeros(batch_size, dtype=torch.long)}
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0) if autocast else None
    return Step(
        model, batch, optimizer=optimizer, max_grad_norm=1.0, accumulate=micro_batches, autocast=autocast, scaler=scaler
    )


bert_large_of_4 = partial(bert_large, micro_batches=4)
bert_large_fp16 = partial(bert_large, autocast="fp16")
bert_large_of_4_fp16 = partial(bert_large, micro_batches=4, autocast="fp16")


def bert_base(batch_size: int, seq_len: int, attn: str) -> tuple[Any, Any, Any]:
    """The training step of transformers' own comparisons of eager attention with sdpa: no loss but a sum, fp16."""
    return _summed(transformers.BertLMHeadModel, transformers.BertConfig(), batch_size, seq_len, attn)


def opt_350m(batch_size: int, seq_len: int, attn: str) -> tuple[Any, Any, Any]:
    """As ``bert_base``."""
    config = transformers.OPTConfig(
        hidden_size=1024, num_hidden_layers=24, ffn_dim=4096, num_attention_heads=16, word_embed_proj_dim=512,
        do_layer_norm_before=False,
    )  # fmt: skip
    return _summed(transformers.OPTForCausalLM, config, batch_size, seq_len, attn)


class _Summed:
    """The loss of those comparisons, whose loop keeps a step's outputs until the next forward has made others."""

    def __init__(self) -> None:
        self.outputs: Any = None

    def __call__(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        self.outputs = model(**batch)
        return self.outputs.logits.sum()


def _summed(cls: Any, config: Any, batch_size: int, seq_len: int, attn: str) -> tuple[Any, Any, Any]:
    config._attn_implementation = attn
    ids = torch.randint(config.vocab_size, (batch_size, seq_len))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return cls(config).to(torch.float16).train(), batch, _Summed()


def llama_2_7b_lora(batch_size: int, seq_len: int) -> Step:
    """LoRA of rank 64 on all linear layers with a dropout of 0.1, adapters in bf16 like everything else."""
    return _adapters_in_bf16(WorkloadSpec(model="llama-2-7b", batch_size=batch_size, seq_len=seq_len, **_LORA))


def llama_2_7b_qlora(batch_size: int, seq_len: int) -> Step:
    """The same on a base in 4 bits."""
    spec = WorkloadSpec(model="llama-2-7b", batch_size=batch_size, seq_len=seq_len, load_in_4bit=True, **_LORA)
    return _adapters_in_bf16(spec)


_LORA: dict[str, Any] = {"packed": True, "dtype": "bf16", "lora": {"r": 64, "target_modules": "all-linear"}}


def _adapters_in_bf16(spec: WorkloadSpec) -> Step:
    step = build(spec)
    for module in step.model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = torch.nn.Dropout(0.1)  # type: ignore[index]
    for name, parameter in step.model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    return step


def error(predicted: float, measured: float) -> float:
    return 100 * (predicted / measured - 1)


def spread(errors: list[float]) -> str:
    middle, low, high = statistics.median(errors), min(errors), max(errors)
    return f"{len(errors)} figures, off by {middle:+.1f} % in the median, {low:+.1f} to {high:+.1f} %"


def by_source(jobs: list[Job], found: dict[str, Predicted]) -> str:
    """Errors of seconds by where they were published: one source's rows have one cause of error in common."""
    errors: dict[str, list[float]] = {}
    for job in jobs:
        if job.seconds is not None and not job.fitted:
            source = re.sub(r"https://(?:github\.com/)?([^/]+/[^/]+).*", r"\1", job.source)
            errors.setdefault(f"{source}, {job.card}", []).append(error(found[job.id].seconds(job), job.seconds))
    rows = [
        [name, str(len(each)), *(f"{value:+.1f} %" for value in (statistics.median(each), min(each), max(each)))]
        for name, each in errors.items()
    ]
    medians = spread([statistics.median(each) for each in errors.values()])
    return f"{table(['source', 'rows', 'median', 'least', 'most'], rows)}\n\nMedians of sources: {medians}"


def compared(known: list[tuple[Job, str, float, float]], unit: str, digits: str) -> str:
    """Each job's figure with what it is of, measured and simulated; those fitted to are left out of the summary."""
    rows = [
        (job.what, job.card, what, f"{measured:{digits}}", f"{now:{digits}}", f"{error(now, measured):+.1f} %")
        for job, what, measured, now in known
    ]
    errors = [error(now, measured) for _, what, measured, now in known if "fitted" not in what]
    names = ["job", "card", "what was read", f"measured, {unit}", f"simulated, {unit}", "off by"]
    return f"{table(names, rows)}\n\n{spread(errors)}"


def bytes_table(jobs: list[Job], found: dict[str, Predicted]) -> str:
    known = [(job, KINDS[job.kind], job.gib, found[job.id].bytes[job.kind] / GIB) for job in jobs if job.gib]
    return compared(known, "GiB", ".2f")


def seconds_table(jobs: list[Job], found: dict[str, Predicted]) -> str:
    known = []
    for job in (job for job in jobs if job.seconds):
        what = ("forward, backward" if job.without_optimizer else "step") + ", fitted" * job.fitted
        known.append((job, what, job.seconds, found[job.id].seconds(job)))
    return compared(known, "s", ".4g")


def covered(jobs: list[Job], found: dict[str, Predicted]) -> str:
    """How many of the peaks a headroom would have left room for, beside the share that every promise has for safety."""
    above = [job.gib * GIB / found[job.id].bytes[job.kind] for job in jobs if job.gib is not None]
    rows = [[f"{h} %", str(sum(a <= (1 + SAFETY) / (1 - h / 100) for a in above))] for h in (0, 5, 10, 15)]
    said = f"The largest is {100 * (max(above) - 1):.0f} % above what is simulated."
    return f"{table(['headroom', f'peaks within budget, of {len(above)}'], rows)}\n\n{said}"


def ratios_table(jobs: list[Job], found: dict[str, Predicted]) -> str:
    """Seconds and bytes with every layer recomputed, over those of the same job without."""
    known, rows = {job.id: job for job in jobs}, []
    for job in (j for j in jobs if j.baseline is not None):
        base = known[job.baseline]
        now, then, row = found[job.id], found[base.id], [job.what, job.card]
        for measured, plain, simulated in (
            (job.seconds, base.seconds, now.seconds(job) / then.seconds(base)),
            (job.gib, base.gib, now.bytes[job.kind] / then.bytes[base.kind]),
        ):
            row += [f"{measured / plain:.3f}", f"{simulated:.3f}"] if measured and plain else ["", ""]
        rows.append(row)
    heads = ["job, every layer recomputed", "card", "seconds, measured", "simulated", "bytes, measured", "simulated"]
    return table(heads, rows)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    jobs = [Job.model_validate(job) for job in yaml.safe_load(path.read_text(encoding="utf-8"))]
    found: dict[str, Predicted] = {}
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs:
            found[job.id] = predict(job, Path(folder))
            print(f"{job.id}: {found[job.id]}", file=sys.stderr, flush=True)
    own, others = ([job for job in jobs if job.own is own] for own in (True, False))
    sections = (
        ("Bytes, transformers' own models", f"{bytes_table(own, found)}\n\n{covered(own, found)}"),
        ("Seconds, transformers' own models", seconds_table(own, found)),
        ("Seconds by source", by_source(jobs, found)),
        ("What recomputing every layer costs and saves", ratios_table(jobs, found)),
        ("Other implementations of the same architectures: bytes", bytes_table(others, found)),
        ("Other implementations of the same architectures: seconds", seconds_table(others, found)),
    )
    print("\n\n".join(f"## {title}\n\n{text}" for title, text in sections))


if __name__ == "__main__":
    main()
