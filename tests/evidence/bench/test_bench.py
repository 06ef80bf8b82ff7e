"""A whole bench on a small workload in this process, and what its rounds say."""

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autockpt.devices import get_device
from autockpt.measuring import StepRunner, environment_of
from autockpt.schema import SearchRequest, SearchSpace, Silence, WorkloadSpec, parse_budget
from tests.evidence.bench.__main__ import Bench, Row, duels, open_rows, page, ratio
from tests.evidence.bench.peers import OURS
from tests.measuring.small_workloads import make_workload

PEAKS = {"save everything": 100, "first-k 1": 50, "first-k 2": 60, "every-n 2": 90, f"{OURS} 60%": 58}
SECONDS = {"save everything": 1.0, "first-k 1": 1.4, "first-k 2": 1.2, "every-n 2": 1.05, f"{OURS} 60%": 1.1}


class Here:
    """What a bench needs of a WorkerMeasurer, without a process, JSON both ways."""

    def __init__(self) -> None:
        self.runner = StepRunner(make_workload(), get_device("cpu"))
        self.environment = environment_of(self.runner.device)

    def call(self, ref: str, payload: dict[str, Any]) -> dict[str, Any]:
        module, name = ref.split(":")
        function = getattr(importlib.import_module(module), name)
        return json.loads(json.dumps(function(self.runner, json.loads(json.dumps(payload)))))

    def rest(self) -> None: ...


def made(worker: Any) -> Bench:
    asked = SearchRequest(
        budget=parse_budget("50%"),
        workload=WorkloadSpec(model="small"),
        space=SearchSpace(),
        command=("python", "-m", "tests.evidence.bench"),
    )
    return Bench(asked, worker, Silence())


def of_numbers(number: int, noise: float = 0.002) -> Bench:
    """Each round as a whole is slower or faster than the others by far more than methods differ."""
    bench, draw = made(None), random.Random(1)
    bench.budgets = {"60%": 60, "100%": 100}
    for key, peak in PEAKS.items():
        peer = key.rpartition(" ")[0] if key[-1] in "12%" else key
        bench.rows[key] = Row(key, peer, state="measured", peak_bytes=peak, budget="60%" if peer == OURS else "")
    for _ in range(number):
        weather = draw.uniform(0.5, 2.0)
        bench.rounds.append({key: s * weather * (1 + draw.gauss(0, noise)) for key, s in SECONDS.items()})
    return bench


@pytest.mark.slow
def test_every_row_is_measured_in_turns_or_says_why_not() -> None:
    bench = made(Here())
    bench.make_rows(["99%"], ["recompute all", "first-k", "offload all"])
    states = {key: row.state for key, row in bench.rows.items()}
    assert states.pop("offload all") == "missing"
    assert set(states.values()) == {"measured"} and {"save everything", "recompute all", "first-k 1"} <= states.keys()
    assert all(bench.rows[key].gradients == "bit-equal" for key in states)
    for _ in range(2):
        bench.take_turns(states)
    assert [seconds.keys() for seconds in bench.rounds] == [states.keys()] * 2
    text = page(bench)
    assert all(words in text for words in ("| first-k 2 |", bench.worker.environment.device.name))


def test_only_what_fits_takes_part_and_the_fastest_comes_first() -> None:
    bench = of_numbers(12)
    ours, found = duels(bench, OURS, "60%")
    assert ours is not None and [rival for rival, *_ in found] == ["first-k 2", "first-k 1"]
    assert all(interval.high < 1 and rounds == 12 for _, interval, rounds in found)
    assert duels(bench, OURS, "100%") == (None, [])
    known = ratio("first-k 2", "save everything", bench.rounds)
    assert known is not None and known[0].low < 1.2 < known[0].high


@pytest.mark.parametrize(("noise", "most", "open_now"), [(0.0005, 60, False), (0.05, 60, True), (0.05, 12, False)])
def test_rounds_go_on_until_settled_or_the_limit(noise: float, most: int, open_now: bool) -> None:
    wanted = open_rows(of_numbers(12, noise), most)
    assert ({f"{OURS} 60%", "first-k 2"} <= wanted) if open_now else not wanted


@pytest.mark.campaign
def test_a_bench_of_real_steps_in_a_process_of_its_own(tmp_path: Path) -> None:
    step = ("--model", "llama-tiny", "--batch-size", "2", "--seq-len", "32", "--device", "cpu")
    few = ("--peers", "recompute all,autockpt", "--choices", "save,recompute", "--rounds", "2", "--most-rounds", "2")
    command = [sys.executable, "-m", "tests.evidence.bench", *step, "--budgets", "90%", *few, "--trials", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=900)
    assert done.returncode == 0, done.stderr
    assert "| recompute all |" in done.stdout and "| autockpt 90% |" in done.stdout
