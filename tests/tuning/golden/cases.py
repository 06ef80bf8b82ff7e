"""Questions whose answers are kept: searches that must not change unnoticed when the code around them is rearranged.

``python -m tests.tuning.golden.cases`` asks all of them again, says what is better, worse or other, and with
``--write`` keeps the new answers. Nothing is measured: simulated hardware, and a made-up device without noise.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from autockpt.schema import SearchRequest, SearchSpace, WorkloadSpec, parse_budget
from autockpt.schema.choices import dump_choice
from autockpt.shipped import load_hardware
from autockpt.tuning import run_search
from tests.tuning import small
from tests.tuning.made_up import search_made_up

ANSWERS = Path(__file__).with_name("answers.json")
ALIKE = 1.5e-6
"""Seconds within which two step times are equal: a plan's file rounds them to 1e-6."""


class Case(NamedTuple):
    """A workload, and what a search for it is asked besides; ``slow`` ones take some ten seconds each."""

    workload: Mapping[str, Any]
    budget: str
    hardware: str = "rtx4090"
    choices: tuple[str, ...] = ()  # empty: all of the default space
    slow: bool = False
    more: Mapping[str, Any] = {}


LLAMA = {"model": "llama-1b", "batch_size": 4, "seq_len": 1536}
GPT2 = {"model": "gpt2", "batch_size": 8, "seq_len": 1024}
LOGITS = {"model": small.LOGITS, "batch_size": 32, "seq_len": 128}
HEADED = ("recompute", "chunked_softmax")

CASES: dict[str, Case] = {
    "llama-tiny 60%act": Case({"model": "llama-tiny"}, "60%act"),
    "llama-tiny 30%act, two choices": Case(
        {"model": "llama-tiny"}, "30%act", choices=("recompute", "offload"), slow=True
    ),
    "vit-tiny 50%act": Case({"model": "vit-tiny"}, "50%act", choices=("recompute", "keep_attention", "offload")),
    "logits 70%": Case(LOGITS, "70%", "cpu", HEADED),
    "logits 10%act": Case(LOGITS, "10%act", "cpu", HEADED),
    "logits 250MB, inexact": Case(LOGITS, "250MB", "cpu", ("recompute",), more={"allow_inexact": True}),
    "llama-1b 24GB": Case(LLAMA, "24GB", slow=True),
    "llama-1b 80%": Case(LLAMA, "80%", slow=True),
    "llama-1b 40%act": Case(LLAMA, "40%act", slow=True),
    "gpt2 12GB": Case(GPT2, "12GB", slow=True),
    "gpt2 8GB": Case(GPT2, "8GB", slow=True),
    "gpt2 50%act": Case(GPT2, "50%act", slow=True),
    "gpt2 20%act, plain head": Case(GPT2, "20%act", choices=("recompute", "keep_attention", "offload"), slow=True),
    "gpt2 6GB, inexact": Case(GPT2, "6GB", slow=True, more={"allow_inexact": True}),
    "gpt2 8GB, 2GB of host memory": Case(GPT2, "8GB", slow=True, more={"host_budget": 2_000_000_000}),
    "llama-8b with LoRA 24GB": Case({"model": "llama-8b", "lora": 16}, "24GB", slow=True),
}
MADE_UP = {
    f"made up, knobs {budget}, {units} units{', simulated' if simulated else ''}": (budget, units, simulated)
    for budget, units, simulated in (("30%act", 6, False), ("50%act", 8, False), ("80%act", 6, True))
}


def answers(slow: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every question with what is answered now; without ``slow`` only those that take few seconds."""
    for name in MADE_UP:
        yield name, answer(name)
    for name, case in CASES.items():
        if slow or not case.slow:
            yield name, answer(name)


def answer(name: str) -> dict[str, Any]:
    """What is answered now: bytes, seconds, and the plan."""
    if name in MADE_UP:
        budget, units, simulated = MADE_UP[name]
        return search_made_up(budget, units, simulated=simulated)
    case = CASES[name]
    space = SearchSpace()
    with tempfile.TemporaryDirectory() as folder:
        request = SearchRequest.model_validate(
            {
                "budget": parse_budget(case.budget),
                "workload": WorkloadSpec.model_validate(case.workload),
                "space": space.restricted(case.choices) if case.choices else space,
                "hardware": load_hardware(case.hardware),
                "trials": 10,
                "out": Path(folder) / "runs",
                **case.more,
            }
        )
        outcome = run_search(request)
    assert outcome.plan is not None and outcome.plan.predicted is not None
    return {
        "budget_bytes": outcome.budget.bytes,
        "peak_bytes": outcome.plan.predicted.peak_bytes,
        "step_seconds": outcome.plan.predicted.step_seconds,
        "plan": {name: dump_choice(choice) for name, choice in outcome.plan.choices.items()},
    }


def compared(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """``same``; or what became of an answer, in words that begin with ``better``, ``worse`` or ``other``."""
    if now == before:
        return "same"
    seconds, earlier = now["step_seconds"], before["step_seconds"]
    change = seconds / earlier - 1
    said = f"{earlier:.6g} s -> {seconds:.6g} s ({change:+.3%}), peak {before['peak_bytes']} -> {now['peak_bytes']}"
    if now["budget_bytes"] != before["budget_bytes"]:
        return f"other: budget {before['budget_bytes']} -> {now['budget_bytes']}; {said}"
    if abs(seconds - earlier) <= ALIKE:
        return "same" if now["peak_bytes"] == before["peak_bytes"] else f"other: {said}"
    return f"{'better' if change < 0 else 'worse'}: {said}"


def main() -> None:
    known = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    for name, now in answers(slow="--quick" not in sys.argv):
        print(f"{name}: {compared(now, known[name]) if name in known else 'new'}", flush=True)
        known[name] = now
    if "--write" in sys.argv:
        ANSWERS.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
