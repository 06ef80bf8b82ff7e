"""What others measured on GPUs and published, next to what a simulation of that card says about the same job.

    OMP_NUM_THREADS=1 python -m tests.evidence.published [FILE]

Reads ``results/published_gpu_202611/measurements.yaml``: jobs with the card, how layers keep their activations, what
was measured and where it was published. Each job is ghost-run and priced by the roofline of its card. Prints Markdown:
bytes and how much headroom would have covered them, seconds, both by source, and what recomputing every layer cost.

This is no measurement of ours: software of other versions ran, and each row says what is not known of it. Rows that a
rule leaves out of the summaries, by stated facts and not by their results, name the fact.
"""

import json
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
import yaml
from pydantic import BaseModel, ConfigDict
from torch.nn.modules.module import register_module_forward_hook
from transformers.loss import loss_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.opt import modeling_opt

from autockpt.cost import simulated_memory
from autockpt.cost.predictor import SAFETY
from autockpt.cost.roofline import roofline_times, waits_for_host
from autockpt.cost.simulation import simulate
from autockpt.schema import Choice, WorkloadSpec, parse_choice
from autockpt.shipped import load_hardware
from autockpt.tracing import Tracer
from autockpt.tracing.kernels.allocator import replay, requests
from autockpt.workload import Step, build
from tests.evidence.tables import table

FILE = Path("results/published_gpu_202611/measurements.yaml")
GIB = 1 << 30
VOCABULARIES = (32000, 49152)  # of models whose head gave fp32

Kind = Literal["allocated", "reserved"]
Loss = Literal["as today", "of 4.45", "of 4.48", "in 16 bits"]  # 4.45 and 4.48: versions of transformers


class Job(BaseModel):
    """A published measurement. ``config`` are fields of a config.json, where no built-in shape has them.

    ``choice`` is every layer's, ``head`` the output head's; ``loss`` says which copies of the logits transformers
    made, which before 4.50 shifted them against the labels. ``gib`` are of the ``kind`` that was read; ``seconds``
    those of a step, ``without_optimizer`` of forward and backward alone, and ``less`` those of another job where only
    the difference was read. ``baseline`` is the job that differs in ``choice`` alone; ``unknown`` is what may differ
    from what is simulated. ``bytes_aside`` and ``seconds_aside`` are facts that keep a figure out of the summaries.
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    what: str
    card: str
    workload: dict[str, Any]
    config: dict[str, Any] | None = None
    choice: Literal["save", "recompute"] = "save"
    head: str | None = None
    loss: Loss = "as today"
    kind: Kind = "allocated"
    gib: float | None = None
    bytes_aside: str = ""
    seconds: float | None = None
    without_optimizer: bool = False
    less: str | None = None
    seconds_aside: str = ""
    baseline: str | None = None
    source: str
    unknown: str = ""

    @property
    def origin(self) -> str:
        """Who published it, and the card: such rows have their causes of error in common."""
        return re.sub(r"https://(?:github\.com/)?([^/]+/[^/]+).*", r"\1", self.source) + f", {self.card}"


class Predicted(NamedTuple):
    """The same figures, simulated: bytes by kind, seconds with and without the optimizer; who waits for its host."""

    bytes: dict[Kind, int]
    step: float
    optimizer: float
    waits: bool

    def seconds(self, job: Job) -> float:
        return self.step - self.optimizer * job.without_optimizer


class Figure(NamedTuple):
    """One figure of a job, measured and simulated, and why the rule leaves it out (empty where it does not)."""

    job: Job
    what: str
    measured: float
    simulated: float
    aside: str

    @property
    def error(self) -> float:
        """In percent of what was measured."""
        return 100 * (self.simulated / self.measured - 1)


def predict(job: Job, folder: Path) -> Predicted:
    """Simulate a job: its ghost run's bytes, and its ops on the roofline of its card."""
    hardware, workload = load_hardware(job.card), dict(job.workload)
    if job.config is not None:
        path = folder / f"{job.id}.json"
        path.write_text(json.dumps(job.config))
        workload["model"] = str(path)
    spec = WorkloadSpec.model_validate(workload)
    with _loss(job.loss), Tracer.from_spec(spec, hardware=hardware) as tracer:
        choices: dict[str, Choice] = {u.name: parse_choice(job.choice) for u in tracer.units if u.role == "block"}
        if job.head is not None:
            assert tracer.head is not None, f"{job.id} has no output head"
            choices[tracer.head.name] = parse_choice(job.head)
        graph = tracer.trace(choices)
    whole, times = replace(simulated_memory(hardware), safety=0.0)(graph), roofline_times(hardware, [graph])
    return Predicted(
        bytes={"allocated": replay(requests(graph)).allocated, "reserved": whole - hardware.context_bytes},
        step=simulate(graph, times).step_seconds,
        optimizer=times.optimizer_seconds,
        waits=bool(waits_for_host(hardware, graph)),
    )


@contextmanager
def _loss(name: Loss) -> Iterator[None]:
    """Let models compute their loss as transformers did when a job ran."""

    def upcast(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output.float() if isinstance(module, torch.nn.Linear) and module.out_features in VOCABULARIES else None

    def shifted(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        whole = logits if name == "in 16 bits" else logits.float()
        kept = whole[..., :-1, :].contiguous()
        return F.cross_entropy(kept.view(-1, vocab_size), labels[..., 1:].reshape(-1))

    with mock.patch.dict(loss_utils.LOSS_MAPPING, {} if name == "as today" else {"ForCausalLM": shifted}):
        hook = register_module_forward_hook(upcast) if name == "of 4.45" else None
        yield
        if hook is not None:
            hook.remove()


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
    """As ``bert_base``, with OPT's attention as it was in 2024."""
    vars(modeling_opt)["ALL_ATTENTION_FUNCTIONS"] = _AttentionOf2024()
    config = transformers.OPTConfig(
        hidden_size=1024, num_hidden_layers=24, ffn_dim=4096, num_attention_heads=16, word_embed_proj_dim=512,
        do_layer_norm_before=False,
    )  # fmt: skip
    return _summed(transformers.OPTForCausalLM, config, batch_size, seq_len, attn)


class _AttentionOf2024:
    """OPT's attention before transformers 4.50: queries, keys and values are copied head by head.

    So the fused kernel's result lies head by head, too, and is copied for the projection. The eager one takes the
    maximum of its scores and the least number, which keeps them once more.
    """

    def get_interface(self, name: str, eager: Any) -> Any:
        return self.eager if name == "eager" else self.fused

    def fused(self, module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        query, key, value = (t.contiguous() for t in (query, key, value))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **options)

    def eager(self, module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float, **_: Any) -> Any:
        query, key, value = (t.contiguous() for t in (query, key, value))
        scores = query @ key.transpose(-1, -2) + mask
        scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min))
        shares = F.dropout(scores.softmax(-1, dtype=torch.float32).to(query.dtype), dropout, module.training)
        return (shares @ value).transpose(1, 2), None


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


def spread(errors: Sequence[float]) -> tuple[str, str, str, str]:
    """How many, their median, what nine of ten are within, and the worst."""
    by_size = sorted(errors, key=abs)
    nine_of_ten = abs(by_size[ceil(0.9 * len(errors)) - 1])
    return str(len(errors)), f"{statistics.median(errors):+.1f} %", f"± {nine_of_ten:.1f} %", f"{by_size[-1]:+.1f} %"


def summary(figures: list[Figure]) -> str:
    """Errors by source, of those that the rule keeps and of all."""
    kept = [f for f in figures if not f.aside]
    sources: dict[str, list[float]] = {}
    for f in kept:
        sources.setdefault(f.job.origin, []).append(f.error)
    rows = [(name, *spread(errors)) for name, errors in sources.items()]
    rows.append(("**by the rule**", *spread([f.error for f in kept])))
    rows.append(("medians of the sources", *spread([statistics.median(errors) for errors in sources.values()])))
    rows.append(("all, whatever the rule", *spread([f.error for f in figures])))
    return table(["source", "figures", "median", "nine of ten", "worst"], rows)


def listed(figures: list[Figure], unit: str, digits: str) -> str:
    rows = []
    for f in figures:
        numbers = f"{f.measured:{digits}}", f"{f.simulated:{digits}}", f"{f.error:+.1f} %"
        rows.append((f.job.what, f.job.card, f.what, *numbers, f.aside))
    heads = ["job", "card", "what was read", f"measured, {unit}", f"simulated, {unit}", "off by", "left out, as"]
    return table(heads, rows)


def covered(figures: list[Figure]) -> str:
    """How many of the peaks a headroom would have left room for, beside the share that every promise has for safety."""
    above = [f.measured / f.simulated for f in figures if not f.aside]
    rows = []
    for headroom in (0, 2, 5, 10):
        room = (1 + SAFETY) / (1 - headroom / 100)
        rows.append((f"{headroom} %", str(sum(a <= room for a in above)), f"{100 * (max(above) / room - 1):+.1f} %"))
    return table(["headroom", f"peaks within budget, of {len(above)}", "the largest, over budget"], rows)


def bytes_of(jobs: list[Job], found: dict[str, Predicted]) -> list[Figure]:
    return [Figure(j, j.kind, j.gib, found[j.id].bytes[j.kind] / GIB, j.bytes_aside) for j in jobs if j.gib is not None]


def seconds_of(jobs: list[Job], found: dict[str, Predicted]) -> list[Figure]:
    known, figures = {job.id: job for job in jobs}, []
    for job in jobs:
        if job.seconds is None:
            continue
        what, now = "forward, backward" if job.without_optimizer else "step", found[job.id]
        measured, simulated = job.seconds, now.seconds(job)
        if job.less is not None:
            less = known[job.less]
            assert less.seconds is not None, f"{less.id} has no seconds"
            what += f", less that of {less.workload['batch_size']}"
            measured, simulated = measured - less.seconds, simulated - found[less.id].seconds(less)
        aside = job.seconds_aside or ("waits for its host" if now.waits else "")
        figures.append(Figure(job, what, measured, simulated, aside))
    return figures


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


def report(jobs: list[Job], found: dict[str, Predicted]) -> str:
    peaks, steps = bytes_of(jobs, found), seconds_of(jobs, found)
    sections = (
        ("Bytes, by source", f"{summary(peaks)}\n\n{covered(peaks)}"),
        ("Seconds, by source", summary(steps)),
        ("What recomputing every layer costs and saves", ratios_table(jobs, found)),
        ("Bytes", listed(peaks, "GiB", ".2f")),
        ("Seconds", listed(steps, "s", ".4g")),
    )
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in sections)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    jobs = [Job.model_validate(job) for job in yaml.safe_load(path.read_text(encoding="utf-8"))]
    found: dict[str, Predicted] = {}
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs:
            found[job.id] = predict(job, Path(folder))
            print(f"{job.id}: {found[job.id]}", file=sys.stderr, flush=True)
    print(report(jobs, found))


if __name__ == "__main__":
    main()
