"""Plans with choices by the length of the batch beside the plan for the longest alone.

    OMP_NUM_THREADS=1 nice python -m tests.evidence.lengths cpu results/lengths_cpu_202611
    OMP_NUM_THREADS=1 nice python -m tests.evidence.lengths standin results/lengths_cpu_202611

Three made-up histograms with long tails, named after what they look like: instructions (log-normal, most rows short),
documents (a mixture: half short, a tail cut off at the longest), code (a power law). A Llama of six layers, batches
of 4 rows drawn at random and padded to the longest among them. The plan is searched for with ``lengths=`` (measured
steps, in this process); then both train on one sequence of batches in turns, batch by batch, each on a copy of the
model with the same weights, and so does plain training: every gradient of every step is compared bit by bit (on the
stand-in, whose budget is a real limit that plain training breaks, with the plan for the longest). Time is that of the
processor in this process. ``OMP`` threads: one.

On the CPU nothing limits the allocator: peaks are measured at every distinct length, and held against the budget. On
the stand-in (an accelerator that runs late, on the CPU; see ``tests.standin``) the budget is the allocator's limit for
all steps, so a step over it is an out-of-memory error; the same steps are then trained with ``adaptive=True``, while
another process seems to take a part of the device for a third of the time.
"""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

import autockpt
from autockpt.devices import get_device
from autockpt.history.statistics import ratio_interval
from autockpt.schema.lengths import Lengths
from autockpt.workload import Step

LONGEST, ROWS, SEED, LAYERS = 256, 4, 7, 6
STEPS = 1000
TIMED = 120
"""Batches that both are timed on; gradients are compared on them, too. The rest of ``STEPS`` is trained by one."""


def instructions(draw: random.Random) -> int:
    return min(LONGEST, 8 + int(draw.lognormvariate(3.0, 0.7)))


def documents(draw: random.Random) -> int:
    short = draw.random() < 0.7
    return min(LONGEST, 8 + int(draw.lognormvariate(3.0, 0.4) if short else draw.lognormvariate(4.3, 0.6)))


def code(draw: random.Random) -> int:
    return min(LONGEST, int(12 * draw.paretovariate(1.3)))


HISTOGRAMS: dict[str, Callable[[random.Random], int]] = {
    "instructions": instructions,
    "documents": documents,
    "code": code,
}


def made_model(device: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LONGEST,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train().to(device)


def batch_of(length: int, number: int, device: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 512, (ROWS, length), generator=torch.Generator().manual_seed(number)).to(device)
    return {"input_ids": ids, "labels": ids}


def trained(model: Any, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """One forward and backward; the gradients."""
    model.zero_grad(set_to_none=True)
    model(**batch).loss.backward()
    return [p.grad for p in model.parameters()]


def timed(run: Callable[[], Any], device: str) -> tuple[float, Any]:
    begin = time.process_time()
    made = run()
    get_device(device).synchronize()
    return time.process_time() - begin, made


def equal(one: Iterable[torch.Tensor], two: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def case(name: str, device: str, steps: int) -> dict[str, Any]:
    draw = random.Random(SEED)
    rows = [HISTOGRAMS[name](draw) for _ in range(5000)]
    rows[0] = LONGEST  # the tail of every one reaches it
    lengths = Lengths.of_all(rows)
    model = made_model(device)
    step = Step(model, batch_of(LONGEST, 0, device), optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    budget = budget_of(step)
    began = time.monotonic()
    plan = autockpt.search(
        step,
        budget=f"{budget // 1000}KB",
        lengths=lengths,
        trials=8,
        timeout=100,
        progress=False,
        space=restricted(),
    )
    seconds = time.monotonic() - began
    batches = [max(draw.choices(rows, k=ROWS)) for _ in range(steps)]
    batches[steps // 2] = LONGEST
    found: dict[str, Any] = {
        "histogram": name,
        "rows": str(lengths),
        "budget": budget,
        "sets": [str(each) for each in plan.sets],
        "bounds": [str(each.when) for each in plan.sets],
        "notes": list(plan.notes[-2:]),
        "search_seconds": round(seconds, 1),
        "steps": steps,
    }
    print(json.dumps(found["bounds"]), found["notes"], flush=True)
    with get_device(device).limit(budget if device != "cpu" else None):
        found |= compared(model, plan, batches, device)
        if device != "cpu":
            found["adaptive"] = adapting(model, plan, batches, device, budget)
    if device == "cpu":
        found["largest_peak"] = max(peak(model, plan, length) for length in sorted({*batches, LONGEST})[-12:])
    return found


def restricted() -> Any:
    from search_spaces.spaces import load_space

    return load_space("knobs").restricted(("recompute", "selective", "remake"))


def budget_of(step: Step) -> int:
    """Of the peaks of the longest batch, a third of the way from recomputing every layer to saving everything."""
    from autockpt.measuring import StepRunner
    from autockpt.schema import RECOMPUTE

    device = get_device(str(step.device.type))
    runner = StepRunner(step, device)
    lean = {f"model.layers.{n}": RECOMPUTE for n in range(LAYERS)}
    most, least = (runner.measure(choices, steps=1).peak_bytes for choices in ({}, lean))
    return round(least + (most - least) * 0.35)


def compared(model: Any, plan: autockpt.Plan, batches: list[int], device: str) -> dict[str, Any]:
    """Both plans in turns on the first batches, then the rest under the plan with sets; out of memory is counted."""
    plain, alone = copy.deepcopy(model), copy.deepcopy(model)
    ours, base, unequal, broke = list[float](), list[float](), 0, 0
    with autockpt.apply(model, plan) as handle, autockpt.apply(alone, plan.sets[-1]):
        for number, length in enumerate(batches):
            batch = batch_of(length, number, device)
            try:
                if number >= TIMED:
                    got = trained(model, batch)
                    if device == "cpu":
                        unequal += not equal(got, trained(plain, batch))
                    continue
                pairs = [(model, ours), (alone, base)]
                made = {}
                for which, times in pairs if number % 2 else pairs[::-1]:
                    seconds, made[id(which)] = timed(lambda which=which, batch=batch: trained(which, batch), device)
                    times.append(seconds)
                wanted = made[id(alone)] if device != "cpu" else trained(plain, batch)
                unequal += not equal(made[id(model)], wanted)
            except torch.OutOfMemoryError:
                broke += 1
            if number == TIMED - 1:
                alone.zero_grad(set_to_none=True)
        used = dict(handle._session.used)  # type: ignore[union-attr]
    skip = 10  # first calls are looked at closely
    total = sum(ours[skip:]) / sum(base[skip:])
    blocks = [(sum(ours[i : i + 10]), sum(base[i : i + 10])) for i in range(skip, len(ours) - 9, 10)]
    ratio = ratio_interval([a for a, _ in blocks], [b for _, b in blocks])
    return {
        "ratio_of_sums": total,
        "interval": [ratio.low, ratio.high],
        "unequal_gradients": unequal,
        "out_of_memory": broke,
        "forwards_by_set": used,
    }


def adapting(model: Any, plan: autockpt.Plan, batches: list[int], device: str, budget: int) -> dict[str, Any]:
    """The same steps by ``adaptive=True``, with another holder of an eighth of the budget in the middle third."""
    broke, other, optimizer = 0, None, torch.optim.SGD(model.parameters(), lr=0.0)
    third = len(batches) // 3
    used = Counter[int]()
    with autockpt.apply(model, plan, adaptive=f"{budget // 1000}KB") as handle:
        for number, length in enumerate(batches):
            if number == third:
                other = torch.empty(budget // 8, dtype=torch.uint8, device=device)
            if number == 2 * third:
                other = None
            try:
                trained(model, batch_of(length, number, device))
            except torch.OutOfMemoryError:
                broke += 1
            optimizer.step()
        moves = [str(move) for move in handle.moves]
        used.update(handle._session.used)  # type: ignore[union-attr]
    del other
    return {"out_of_memory": broke, "moves": moves, "forwards_by_set": dict(used)}


def peak(model: Any, plan: autockpt.Plan, length: int) -> int:
    """Measured peak of a whole step at one length, bytes."""
    step = Step(model, batch_of(length, 1, "cpu"), optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    with autockpt.apply(model, plan):
        step.cycle()
        return get_device("cpu").measure_peak(step.cycle, step.resident_bytes()).peak_bytes


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main(device: str, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    steps = int(os.environ.get("STEPS", STEPS))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{device}.jsonl"
    for name in names or list(HISTOGRAMS):
        found = case(name, device, steps) | {"device": device, "commit": commit(), "load": round(os.getloadavg()[0], 1)}
        with file.open("a") as out:
            out.write(json.dumps(found) + "\n")
        print({k: v for k, v in found.items() if k not in ("sets", "rows")}, flush=True)


if __name__ == "__main__":
    kind, where, *rest = sys.argv[1:]
    if kind == "standin" and not os.environ.get("STANDIN_SCHEDULE"):
        from tests.standin import build

        again = [sys.executable, "-m", "tests.evidence.lengths", *sys.argv[1:]]
        os.execve(sys.executable, again, build.environment("eager"))
    main(kind, Path(where), rest)
