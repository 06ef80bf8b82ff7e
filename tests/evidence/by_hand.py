"""Can a plan that people write by hand beat the plan that a search names? Paired and interleaved, on ten models.

    OMP_NUM_THREADS=1 python -m tests.evidence.by_hand [MODEL …]

For each model and budget: one search, then every simple mixture that fits: the first or the last k layers offloaded,
recomputed, or selective with one set of kept outputs, all others saving, k as small as the budget allows. All of them
run interleaved for a few rounds, the two fastest against the named plan until the 95 % interval of the ratio of step
times is within ± 0.5 % or 20 rounds are done. Peaks of mixtures are those of their ghost runs. Without arguments all
models; one row of the table for each budget.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import transformers

from autockpt.measuring import WorkerMeasurer
from autockpt.measuring.statistics import judge, ratio_interval
from autockpt.schema import (
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    Choice,
    SearchOutcome,
    SearchRequest,
    WorkloadSpec,
    format_binary,
    parse_budget,
    plan_hash,
    words,
)
from autockpt.schema.runs import RunDirectory
from autockpt.shipped import load_space
from autockpt.tracing import Tracer
from autockpt.tuning import run_search

BUDGETS = ("30%act", "50%act", "75%act")
TRIALS, ROUNDS, RIVALS = 8, 3, 2
WITHIN, FEWEST, AT_A_TIME, MOST = 0.005, 10, 5, 20  # half an interval, and rounds of a pair


class Shape(NamedTuple):
    """A small model's configuration, by the names that most configurations share."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    batch_size: int
    seq_len: int
    more: Mapping[str, Any] = MappingProxyType({})


MODELS = {
    "qwen2": Shape(
        192, 640, 10, 6, 1, 160, {"num_key_value_heads": 3, "vocab_size": 1500, "tie_word_embeddings": True}
    ),
    "llama": Shape(128, 352, 14, 4, 2, 96),
    "gpt2": Shape(160, 640, 9, 5, 2, 96, {"n_inner": 640}),
    "bert": Shape(192, 768, 7, 6, 2, 96),
    "gpt_neox": Shape(160, 640, 8, 5, 1, 160),
    "gemma2": Shape(128, 448, 10, 4, 1, 160, {"num_key_value_heads": 2, "head_dim": 32}),
    "mistral": Shape(96, 288, 16, 6, 2, 96, {"num_key_value_heads": 2}),
    "opt": Shape(192, 768, 6, 6, 1, 160, {"ffn_dim": 768, "word_embed_proj_dim": 192}),
    "phi": Shape(160, 512, 9, 5, 1, 160),
    "qwen3": Shape(128, 512, 12, 4, 1, 160, {"num_key_value_heads": 1, "head_dim": 32}),
}


def workload(name: str, folder: Path) -> WorkloadSpec:
    """The model's step: random weights, fp32, no optimizer."""
    shape = MODELS[name]
    sizes = {key: value for key, value in shape._asdict().items() if key not in ("batch_size", "seq_len", "more")}
    config = transformers.AutoConfig.for_model(name, **({"vocab_size": 1200} | sizes | dict(shape.more)))
    auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    config.architectures = [auto._model_mapping[type(config)].__name__]
    config.save_pretrained(folder / name)
    path = folder / name / "config.json"
    return WorkloadSpec(model=str(path), batch_size=shape.batch_size, seq_len=shape.seq_len, optimizer="none")


def kept_sets(run: RunDirectory) -> list[Choice]:
    """The sets of kept outputs that the search weighed for a layer."""
    profile = run.profile()
    assert profile is not None
    return [item.choice for item in profile.menus[0].items if item.choice.kind == "selective"]


def mixtures(
    tracer: Tracer, layers: Sequence[str], choices: Sequence[Choice], budget: int
) -> Iterator[tuple[str, dict]]:
    """The simple mixtures that fit, by name: of each choice, on the first and on the last layers, the fewest."""
    for choice in choices:
        for end in ("first", "last"):

            def plan(count: int, end: str = end, choice: Choice = choice) -> dict[str, Choice]:
                chosen = layers[:count] if end == "first" else layers[len(layers) - count :]
                return {name: choice if name in chosen else SAVE for name in layers}

            fewest, most = 1, len(layers)
            if tracer.trace(plan(most)).peak_bytes > budget:
                continue
            while fewest < most:  # peaks fall with every layer more
                middle = (fewest + most) // 2
                fits = tracer.trace(plan(middle)).peak_bytes <= budget
                fewest, most = (fewest, middle) if fits else (middle + 1, most)
            yield f"{end} {most} {choice}", plan(most)


def one(name: str, spec: WorkloadSpec, budget: str, out: Path) -> None:
    """One row: search, and measure the named plan against its simple rivals."""
    begin = time.monotonic()
    request = SearchRequest(
        budget=parse_budget(budget),
        workload=spec,
        space=load_space("knobs"),
        device="cpu",
        trials=TRIALS,
        out=out,
    )
    found = run_search(request)
    seconds = time.monotonic() - begin
    assert found.plan is not None and found.run_directory is not None
    with WorkerMeasurer(spec, "cpu") as worker, Tracer.from_spec(spec) as tracer:
        ours = found.plan.expand_planned()
        layers = [unit.name for unit in tracer.units if unit.role == "block"]
        sets = kept_sets(RunDirectory.open(found.run_directory))
        rivals = dict(mixtures(tracer, layers, [OFFLOAD, RECOMPUTE, *sets], found.budget.bytes))
        times = worker.compare({**rivals, "none": {}}, rounds=ROUNDS)
        fastest = sorted(rivals, key=lambda rival: statistics.median(times[rival]))[:RIVALS]
        cells = [versus(worker, ours, rival, rivals[rival]) for rival in fastest]
    measured = found.plan.measured
    assert measured is not None
    row = [
        name,
        budget,
        f"`{words.strip(ours)}`",
        format_binary(found.budget.bytes),
        format_binary(measured.peak_bytes),
    ]
    print("| " + " | ".join([*row, overhead(found), str(len(rivals)), *cells, f"{seconds:.0f} s"]) + " |", flush=True)


def overhead(found: SearchOutcome) -> str:
    """What the search measured of its plan, compared with saving everything."""
    rows = {row.name: row.measured for row in found.rows}
    ours, none = rows["ours"], rows["none"]
    return "" if ours is None or none is None else words.share(ours.step_seconds / none.step_seconds - 1, signed=True)


def versus(worker: WorkerMeasurer, ours: Mapping[str, Choice], name: str, rival: Mapping[str, Choice]) -> str:
    """The ratio of step times, ours to the rival's, in words."""
    if plan_hash(ours) == plan_hash(rival):
        return f"{name}: the same plan"

    # looking again stops a little more readily on a lucky streak: the interval then covers the truth in 92 to 95 of 100
    times: dict[str, list[float]] = {"ours": [], "rival": []}
    while True:
        rounds = AT_A_TIME if times["ours"] else FEWEST
        for which, seconds in worker.compare({"ours": ours, "rival": rival}, rounds=rounds).items():
            times[which] += seconds
        ratio = ratio_interval(times["ours"], times["rival"])
        if ratio.half_width <= WITHIN or len(times["ours"]) >= MOST:
            break
    verdict = {"faster": "ours faster", "slower": "**ours slower**", "undecided": "undecided"}[judge(ratio)]
    return f"{name}: {ratio}, {verdict}"


def main(names: Sequence[str]) -> None:
    """All budgets of the models."""
    columns = ("model", "budget", "named plan", "in bytes", "its peak", "over saving", "mixtures that fit")
    columns = (*columns, "step time: ours / the fastest mixture", "ours / the next", "search")
    print("| " + " | ".join(columns) + " |")
    print("|---|---|---|--:|--:|--:|--:|---|---|--:|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            spec = workload(name, Path(folder))
            for budget in BUDGETS:
                one(name, spec, budget, Path(folder) / "runs")


if __name__ == "__main__":
    main(sys.argv[1:] or list(MODELS))
