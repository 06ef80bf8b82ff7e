"""A search by the steps of two ranks (gloo): one plan, nothing changed, and no rank that waits forever."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autockpt
from autockpt.cli import main
from autockpt.errors import MeasurementError, RanksError
from autockpt.measuring import Ranks, ranks
from autockpt.schema.choices import RECOMPUTE
from tests.children import start_program
from tests.errors import raises
from tests.measuring import sharded_models
from tests.measuring.sharded_models import WIDTH, sharded, squares, step_of
from tests.runtime.processes import in_processes, meet, needs_gloo, on_ranks

pytestmark = [pytest.mark.slow, needs_gloo]


@pytest.fixture(autouse=True)
def _few_layers(monkeypatch: pytest.MonkeyPatch, full_caches: None) -> None:
    monkeypatch.setattr(sharded_models, "LAYERS", 2)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def searches(rank: int, kind: str) -> list[str]:
    ranks = dist.get_world_size()
    step, groups = step_of(kind, ranks), len(dist.distributed_c10d._world.pg_names)
    before = [local(p).detach().clone() for p in step.model.parameters()]
    choices = ["recompute", "gathered"] if kind == "fsdp2" else ["offload"]
    plan = autockpt.search(step, budget="60%act", trials=1, choices=choices, progress=False, out=None)
    assert plan.measured is not None
    told = [""] * ranks
    dist.all_gather_object(told, plan.hash)
    wrong = [] if len(set(told)) == 1 else [f"plans {told}"]
    if len(dist.distributed_c10d._world.pg_names) != groups:
        wrong.append("process groups of the search are left")
    if not all(torch.equal(old, local(p)) for old, p in zip(before, step.model.parameters(), strict=True)):
        wrong.append("weights have changed")
    if len(plan.measured.peak_by_rank) != ranks or plan.measured.peak_bytes > plan.budget.bytes:
        wrong.append(f"peaks {plan.measured.peak_by_rank} of {plan.budget}")
    with autockpt.apply(step.model, plan):
        step.forward_backward()
    planned = [local(p.grad).clone() for p in step.model.parameters()]
    step.release_gradients()
    step.forward_backward()
    if not all(torch.equal(a, local(p.grad)) for a, p in zip(planned, step.model.parameters(), strict=True)):
        wrong.append("gradients differ")
    return wrong


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("kind", ["fsdp2", "tensor-parallel", pytest.param("ddp", marks=pytest.mark.campaign)])
def test_all_ranks_get_one_plan_and_nothing_has_changed(kind: str, ranks: int, tmp_path: Path) -> None:
    assert on_ranks(partial(searches, kind=kind), tmp_path, ranks) == []


SEARCH = ("search", "--job", "job.yaml", "--budget", "60%act", "--device", "cpu")
LAUNCHED = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}


def test_launched_ranks_search_once_for_all(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: tests.measuring.sharded_models:whole\nshard: 2\n")

    def start(rank: int) -> Callable[[], subprocess.CompletedProcess[str]]:
        def program() -> None:
            meet(rank, str(tmp_path))
            main()

        options = ("--trials", "1", "--choices", "save,recompute", "--timeout", "12s", "--json")
        return start_program(program, tmp_path, os.environ | LAUNCHED | {"RANK": str(rank)}, *SEARCH, *options)

    first, second = [end() for end in [start(0), start(1)]]
    assert first.returncode == second.returncode == 0, first.stderr
    assert json.loads(first.stdout)["plan"] is not None and not second.stdout  # one of them printed
    (run,) = tmp_path.glob("results/*/report.html")
    plan = autockpt.Plan.load(run.parent / "plan.yaml")
    assert plan.workload is not None and plan.workload.model == "tests.measuring.sharded_models:whole"
    assert plan.measured is not None and len(plan.measured.peak_by_rank) == 2


def test_torchrun_refuses_in_one_voice(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: tests.measuring.sharded_models:with_optimizer\nshard: 2\n")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = os.environ | {"PYTHONPATH": str(Path(autockpt.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = (*launcher, "-m", "autockpt", *SEARCH)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and done.stdout == ""
    assert re.findall(r"\[([a-z.]+)\]$", done.stderr, re.M) == ["usage"]
    assert set(re.findall(r"exitcode *: (-?\d+)", done.stderr)) == {"2"}


def test_a_job_for_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (LAUNCHED | {"RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    for job in ({}, {"shard": 4}, {"shard": 2, "global_batch": 8}):
        with raises(RanksError):
            autockpt.search("llama-tiny", device="cpu", **job)


def refusals(rank: int) -> list[str]:
    """What is said where the ranks do not ask alike."""
    wrong = []
    asked = {
        "another batch": (step_of("ddp", 2, rows=8 + rank), "question"),
        "another question": (step_of("ddp", 2), f"question {rank}"),
        "not sharded": (step_of("none", 2), "question"),
    }
    for what, (step, question) in asked.items():
        try:
            Ranks(step, question)
            wrong.append(f"{what}: not refused")
        except RanksError:
            pass
    alone = step_of("ddp", 2)  # made by both
    with patch.object(ranks, "MEETING", 1.0):
        try:
            if rank == 0:
                Ranks(alone, "question")
                wrong.append("one rank alone: not refused")
        except RanksError as error:
            if "rank 1" not in error.message:
                wrong.append(f"does not name the rank: {error.message}")
    return wrong


def test_ranks_that_do_not_ask_alike_are_refused_on_all(tmp_path: Path) -> None:
    assert on_ranks(refusals, tmp_path) == []


def fails(rank: int, folder: str, where: str) -> None:
    """Rank 1 raises in the middle of a step, or where no collective follows; what each rank is told."""
    meet(rank, folder)
    model, calls = sharded("fsdp2", 2), []

    def fail_late() -> None:
        calls.append(rank)
        if rank == 1 and len(calls) > 3:
            raise ValueError("this batch has no labels")

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if where == "loss":
            fail_late()
        return squares(model, batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if where == "update":
        optimizer.register_step_pre_hook(lambda *_: fail_late())
    step = autockpt.Step(model, torch.ones(8, WIDTH), loss=loss, optimizer=optimizer)
    told = "no error"
    with patch.object(ranks, "FIRST_TIMEOUT", 3.0):
        try:
            with Ranks(step, "question") as measurer:
                if rank:
                    measurer.serve()
                else:
                    measurer.conduct(lambda: measurer.measure({"layers.0": RECOMPUTE}))
        except MeasurementError as error:
            told = error.message
    Path(folder, f"{rank}.txt").write_text(told)
    os._exit(0)  # the group is of no more use


@pytest.mark.parametrize("where", [pytest.param("loss", marks=pytest.mark.campaign), "update"])
def test_a_rank_that_fails_leaves_no_other_waiting(tmp_path: Path, where: str) -> None:
    began = time.monotonic()
    in_processes(fails, (str(tmp_path), where), 2)
    assert time.monotonic() - began < 100
    for rank in (0, 1):
        told = (tmp_path / f"{rank}.txt").read_text()
        assert "rank 1" in told and "no labels" in told


def leaves(rank: int, folder: str) -> None:
    """Rank 1 is gone before the first step is asked for; what the other is told."""
    meet(rank, folder)
    with Ranks(step_of("ddp", 2), "question") as measurer:
        if rank == 0:
            with pytest.raises(MeasurementError) as caught:
                measurer.conduct(lambda: measurer.measure({}))
            Path(folder, "0.txt").write_text(caught.value.message)
        os._exit(0)


def test_a_rank_that_is_gone_is_an_error_on_the_others(tmp_path: Path) -> None:
    in_processes(leaves, (str(tmp_path),), 2)
    assert "left" in (tmp_path / "0.txt").read_text()
