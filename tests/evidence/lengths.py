"""Plans with choices by the length of the batch beside the plan for the longest alone.

    OMP_NUM_THREADS=1 nice python -m tests.evidence.lengths cpu results/lengths_cpu_202611
    OMP_NUM_THREADS=1 nice python -m tests.evidence.lengths standin results/lengths_cpu_202611
    OMP_NUM_THREADS=1 nice python -m tests.evidence.lengths agreement results/lengths_cpu_202611

Three made-up histograms with long tails, named after what they look like: instructions (log-normal, most rows short),
documents (a mixture: half short, a tail cut off at the longest), code (a power law). A Llama of six layers, batches
of 4 rows drawn at random and padded to the longest among them. The plan is searched for with ``lengths=`` (measured
steps, in this process). Both are timed on the first ``TIMED`` batches, interleaved, each on a copy of the model with
the same weights: the processor's time in this process, of one thread. All ``STEPS`` are then trained under the plan,
and by plain training: the gradients of every step are compared bit by bit, by their digests.

On the CPU nothing limits the allocator: peaks are measured at the longest lengths, and held against the budget. On the
stand-in (an accelerator that runs late, on the CPU; see ``tests.standin``) the budget, of which the search left
``HEADROOM`` free, is the allocator's limit for all steps under the plan, which has the device alone: a step over it
is an out-of-memory error. Plain training, which would break it, goes without. The same steps are trained once more
with ``adaptive=True``, while another holder takes a part of the device for a third of the time.

``agreement`` times what two processes on this machine (gloo) need to agree on a set, as ranks with sharded weights do
before each forward: seconds a call by the clock, medians of 20 blocks of 100 calls.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import autockpt
from autockpt.devices import get_device
from autockpt.devices.transport import OffloadTransports
from autockpt.measuring.statistics import ratio_interval
from autockpt.runtime.by_batch import BatchSets
from autockpt.runtime.session import Session
from autockpt.schema.lengths import Lengths
from autockpt.workload import Step
from tests.runtime.processes import in_two_processes

LONGEST, ROWS, SEED, LAYERS = 256, 4, 7, 6
SCALE = {"cpu": 1, "standin": 2}
"""Lengths are this many times as long: next to the segments of 20 MiB that an allocator takes, batches must not be
tiny."""
HEADROOM = {"cpu": "0%", "standin": "10%"}
"""Left free of the budget by the search: batches of changing shape tear a caching allocator's memory."""
STEPS = 1000
TIMED = 120
"""Batches that both are timed on."""


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
        max_position_embeddings=2 * LONGEST,
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


def case(name: str, device: str, steps: int) -> dict[str, Any]:
    draw = random.Random(SEED)
    longest = LONGEST * SCALE[device]
    rows = [HISTOGRAMS[name](draw) * SCALE[device] for _ in range(5000)]
    rows[0] = longest  # the tail of every one reaches it
    lengths = Lengths.of_all(rows)
    model = made_model(device)
    step = Step(model, batch_of(longest, 0, device), optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    budget = budget_of(step)
    began = time.monotonic()
    plan = autockpt.search(
        step,
        budget=f"{budget // 1000}KB",
        headroom=HEADROOM[device],
        lengths=lengths,
        trials=8,
        timeout=100,
        progress=False,
        space=restricted(),
    )
    del step
    seconds = time.monotonic() - began
    batches = [max(draw.choices(rows, k=ROWS)) for _ in range(steps)]
    batches[steps // 2] = longest
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
    found |= timed_apart(model, plan, batches[:TIMED], device)
    wanted = [digest(trained(model, batch)) for batch in made(batches, device)]
    released(model)
    with get_device(device).limit(None if device == "cpu" else budget):
        found |= under_the_plan(model, plan, batches, wanted, device)
        if device != "cpu":
            found["adaptive"] = adapting(model, plan, batches, wanted, device, budget)
    if device == "cpu":
        found["largest_peak"] = max(peak(model, plan, length) for length in sorted({*batches, longest})[-12:])
    return found


def restricted() -> Any:
    from autockpt.shipped import load_space

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


def timed_apart(model: Any, plan: autockpt.Plan, batches: list[int], device: str) -> dict[str, Any]:
    """Seconds with the sets over those with the choices for the longest alone, interleaved batch by batch."""
    ours, base, alone = list[float](), list[float](), copy.deepcopy(model)
    with autockpt.apply(model, plan), autockpt.apply(alone, plan.sets[-1]):
        for number, batch in enumerate(made(batches, device)):
            pairs = [(model, ours), (alone, base)]
            for which, times in pairs if number % 2 else pairs[::-1]:
                times.append(timed(lambda which=which, batch=batch: trained(which, batch), device)[0])
    released(model)
    skip = 10  # first calls are looked at closely
    blocks = [(sum(ours[i : i + 10]), sum(base[i : i + 10])) for i in range(skip, len(ours) - 9, 10)]
    ratio = ratio_interval([a for a, _ in blocks], [b for _, b in blocks])
    return {"ratio_of_sums": sum(ours[skip:]) / sum(base[skip:]), "interval": [ratio.low, ratio.high]}


def under_the_plan(
    model: Any, plan: autockpt.Plan, batches: list[int], wanted: list[str], device: str
) -> dict[str, Any]:
    """All steps under the plan: gradients that differ from the ``wanted`` ones, and errors out of memory."""
    unequal = broke = 0
    with autockpt.apply(model, plan) as handle:
        for batch, plain in zip(made(batches, device), wanted, strict=True):
            try:
                unequal += digest(trained(model, batch)) != plain
            except torch.OutOfMemoryError:
                broke += 1
        used = dict(getattr(handle._session, "used", {}))  # one set counts nothing
    released(model)
    return {"unequal_gradients": unequal, "out_of_memory": broke, "forwards_by_set": used}


def made(batches: list[int], device: str) -> Iterator[dict[str, torch.Tensor]]:
    return (batch_of(length, number, device) for number, length in enumerate(batches))


def released(model: Any) -> None:
    """Gradients off, and what the allocator keeps given back."""
    model.zero_grad(set_to_none=True)
    get_device(str(next(model.parameters()).device.type)).release()


def digest(gradients: Iterable[torch.Tensor]) -> str:
    """Of every bit of the gradients."""
    found = hashlib.blake2b(digest_size=16)
    for gradient in gradients:
        found.update(gradient.cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def adapting(
    model: Any, plan: autockpt.Plan, batches: list[int], wanted: list[str], device: str, budget: int
) -> dict[str, Any]:
    """The same steps by ``adaptive=True``, with another holder of an eighth of the budget in the middle third."""
    unequal, broke, other = 0, 0, None
    optimizer, third = torch.optim.SGD(model.parameters(), lr=0.0), len(batches) // 3
    with autockpt.apply(model, plan, adaptive=f"{budget // 1000}KB") as handle:
        for number, (batch, plain) in enumerate(zip(made(batches, device), wanted, strict=True)):
            if number == third:
                other = torch.empty(budget // 8, dtype=torch.uint8, device=device)
            if number == 2 * third:
                other = None
            try:
                unequal += digest(trained(model, batch)) != plain
            except torch.OutOfMemoryError:
                broke += 1
            optimizer.step()
        moves = [str(move) for move in handle.moves]
        used = dict(getattr(handle._session, "used", {}))  # one set counts nothing
    del other
    return {"unequal_gradients": unequal, "out_of_memory": broke, "moves": moves, "forwards_by_set": used}


def peak(model: Any, plan: autockpt.Plan, length: int) -> int:
    """Measured peak of a whole step at one length, bytes."""
    step = Step(model, batch_of(length, 1, "cpu"), optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    with autockpt.apply(model, plan):
        step.cycle()
        return get_device("cpu").measure_peak(step.cycle, step.resident_bytes()).peak_bytes


def agree(rank: int) -> list[str]:
    """Seconds of an agreement between two ranks, by block."""
    sets = BatchSets(Session((), OffloadTransports(None)), [], [None, None])
    model, blocks = torch.nn.Linear(1, 1), list[float]()
    sets._sharded = True
    for _ in range(20):
        began = time.perf_counter()
        for number in range(100):
            assert sets._agreed(model, (number + rank) % 2) == 1  # the ranks never want the same
        blocks.append((time.perf_counter() - began) / 100)
    return [f"{seconds:.7f}" for seconds in blocks]


def agreement(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as meeting:
        said = in_two_processes(agree, Path(meeting))
    blocks = sorted(float(line.rpartition(" ")[2]) for line in said)
    found = {"seconds": statistics.median(blocks), "least": blocks[0], "most": blocks[-1]}
    found |= {"commit": commit(), "load": round(os.getloadavg()[0], 1)}
    (folder / "agreement.json").write_text(json.dumps(found) + "\n")
    print(found)


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
    if kind == "agreement":
        sys.exit(agreement(Path(where)))
    if kind == "standin" and not os.environ.get("STANDIN_SCHEDULE"):
        from tests.standin import build

        again = [sys.executable, "-m", "tests.evidence.lengths", *sys.argv[1:]]
        os.execve(sys.executable, again, build.environment("eager"))
    main(kind, Path(where), rest)
