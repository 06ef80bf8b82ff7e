"""What a search refuses before it starts anything."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn, ones

from autockpt.devices.cpu import CpuDevice
from autockpt.errors import AutockptError, InfeasibleError, UsageError
from autockpt.schema import DeviceInfo, Environment, SearchRequest, SearchSpace, Silence, WorkloadSpec, parse_budget
from autockpt.schema.lengths import Lengths
from autockpt.schema.run_directory import RunDirectory
from autockpt.shipped import load_hardware
from autockpt.tuning import answer, infeasible, job_sizes, run_search, search_request
from autockpt.tuning.traced_model import less_than_asked
from autockpt.workload import Step
from tests.children import children
from tests.errors import raises
from tests.tuning.small import TWO_LAYERS, live

pytestmark = pytest.mark.slow


class Untouched(Silence):
    def stage(self, name: str, total: int | None = None) -> None:
        raise AssertionError(f"the stage {name} began")


@pytest.mark.parametrize("option", ["out", "plan_out"])
def test_places_that_cannot_be_written_are_refused_at_once(tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("mine")
    places = {"out": tmp_path / "runs", option: tmp_path / "file" / "below"}
    asked = {"budget": parse_budget("60%"), "workload": WorkloadSpec(model="llama-tiny"), "space": SearchSpace()}
    request = SearchRequest.model_validate(asked | places)
    with pytest.raises(AutockptError) as caught:
        run_search(request, Untouched())
    assert caught.value.exit_code == 2 and caught.value.remedy
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "runs").exists()


def described(out: Path, **more: Any) -> SearchRequest:
    asked = {"workload": WorkloadSpec(model=TWO_LAYERS, batch_size=2), "space": SearchSpace(), "out": out}
    return SearchRequest.model_validate(asked | {"budget": parse_budget("1GB")} | more)


def of_live(**more: Any) -> SearchRequest:
    return search_request(budget="1GB", step=live(), **more)


LENGTHS = Lengths(counts={16: 1, 8: 1})
CALLERS: dict[str, Callable[[Path], object]] = {
    "described": lambda out: run_search(described(out), Untouched()),
    "simulated": lambda out: run_search(described(out, hardware=load_hardware("rtx4090")), Untouched()),
    "compiled": lambda out: run_search(described(out, compile="layers"), Untouched()),
    "batches": lambda out: answer(described(out, rows_per_update=4), Untouched()),
    "lengths": lambda out: answer(described(out, lengths=LENGTHS), Untouched()),
    "longest": lambda out: answer(described(out, longest=True), Untouched()),
    "live": lambda out: run_search(of_live(), Untouched()),
    "live batches": lambda out: answer(of_live(global_batch=4), Untouched()),
    "live lengths": lambda out: answer(of_live(lengths=LENGTHS), Untouched()),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_one_of_many_processes_starts_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caller: str) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("autockpt.process.Child.__init__", started)
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = children()
    with raises(UsageError) as caught:
        CALLERS[caller](tmp_path / "runs")
    assert "torchrun" in caught.value.remedy and children() == before and not (tmp_path / "runs").exists()


def test_a_live_search_that_fails_ends_its_processes() -> None:
    before = children()
    with raises(UsageError):
        step = Step(nn.Linear(4, 4), ones(2, 4), loss=lambda model, batch: model(batch).sum())
        run_search(search_request(budget="1GB", step=step))
    assert children() == before


class Untimed(Silence):
    def stage(self, name: str, total: int | None = None) -> None:
        assert name not in ("time single ops", "time whole plans", "baselines"), name


def test_a_budget_that_nothing_fits_is_refused_before_timing(tmp_path: Path) -> None:
    step = live("llama-tiny", batch_size=1)
    asked = search_request(budget="1MB", step=step, timeout=1, out=tmp_path)  # looks for no alternatives
    with raises(InfeasibleError) as caught:
        run_search(asked, Untimed())
    run = RunDirectory.open(next(RunDirectory.below(tmp_path)))
    assert run.refusal() == caught.value.message and not run.trials()
    assert run.graph() is not None and run.profile() is None, "bytes are known, seconds are not"


def test_what_the_worker_holds_is_not_another_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []

    def what_if_of(*asked: Any) -> Any:
        judged.append(asked[3])
        return job_sizes.what_if_of(*asked)

    monkeypatch.setattr(infeasible, "what_if_of", what_if_of)
    monkeypatch.setattr(infeasible, "alternatives", lambda *_, **__: ())
    here, own = os.getpid(), CpuDevice.used_by_others  # the worker, a fork of this process, sees for itself
    monkeypatch.setattr(CpuDevice, "used_by_others", lambda self: self.capacity() if os.getpid() == here else own(self))
    asked = {"budget": parse_budget("800KB"), "workload": WorkloadSpec(model=TWO_LAYERS, batch_size=1, seq_len=16)}
    request = SearchRequest.model_validate(asked | {"space": SearchSpace(), "out": tmp_path, "device": "cpu"})
    with raises(InfeasibleError):
        run_search(request)
    assert 0 <= judged[0] < CpuDevice().capacity()


def test_a_budget_above_what_the_device_has_is_said_to_be() -> None:
    device = DeviceInfo(kind="cuda", name="a card", capacity_bytes=24 << 30)
    environment = Environment(device=device, versions={})
    (note,) = less_than_asked(parse_budget("24TB"), environment)
    assert "a card has 24.0 GiB" in note and "less than the budget" in note
    assert not less_than_asked(parse_budget("24GB"), environment) + less_than_asked(parse_budget("auto"), environment)
