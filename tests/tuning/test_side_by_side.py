"""Micro-batches timed side by side: who wins there is named, whatever the searches of single sizes saw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autockpt import Plan
from autockpt.devices import get_device
from autockpt.errors import MeasurementError
from autockpt.history.rundir import RunDirectory
from autockpt.measuring import StepRunner
from autockpt.runtime import digest_tensors
from autockpt.schema import RECOMPUTE, DeviceInfo, Measurement, ResolvedBudget, SearchOutcome, Silence
from autockpt.schema.batches import BatchSetting
from autockpt.schema.choices import dump_choices
from autockpt.tuning.side_by_side import interleaved, put_right, timed_together
from autockpt.workload import Step

ROWS = 8


def found(seconds: float, size: int, run: Path | None = None) -> tuple[BatchSetting, SearchOutcome]:
    score = Measurement(peak_bytes=1, step_seconds=seconds, noise=0.01, times=(seconds,))
    setting = BatchSetting(
        role="found", batch_size=size, accumulate=ROWS // size, plan="2 recompute", score=score, work=64
    )
    outcome = SearchOutcome(
        plan=Plan(choices={"layers.0": RECOMPUTE}),
        budget=ResolvedBudget(asked="1GB", bytes=10**9),
        device=DeviceInfo(kind="cpu", name="made up", capacity_bytes=1 << 40),
        run_directory=run,
    )
    return setting, outcome


class Bench:
    """A machine on which micro-batches take what ``seconds`` says."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self.seconds, self.opened = seconds, list[int]()

    @contextmanager
    def __call__(self, size: int) -> Iterator[Any]:
        self.opened.append(size)
        yield self

    @property
    def environment(self) -> Any:
        return type("Environment", (), {"device": found(1.0, 1)[1].device})

    def call(self, ref: str, payload: dict[str, Any]) -> dict[str, Any]:
        assert all(asked["rows"] * asked["accumulate"] == ROWS for asked in payload["plans"].values())
        return {name: [self.seconds[name]] * payload["rounds"] for name in payload["plans"]}


def test_the_race_names_the_fastest_once_and_is_answered_from_its_record(tmp_path: Path) -> None:
    run = RunDirectory.enter(tmp_path, {"question": 1}, model="m", device="cpu")
    winner = RunDirectory.enter(tmp_path, {"question": 2}, model="m", device="cpu")
    best = {2: found(1.0, 2, run.path), 4: found(1.1, 4), 8: found(1.2, 8, winner.path), 1: found(5.0, 1)}
    bench = Bench({"2": 2.0, "4": 2.2, "8": 1.8})
    raced, said = timed_together(best, bench, 60.0, Silence())
    assert raced is not None and raced.winner == 8 and bench.opened == [8]
    assert "micro-batches of 8" in said and "2: +11" in said and "4: +22" in said and "1:" not in said
    assert (kept := winner.sizes()) is not None and kept == run.sizes() and kept.winner == 8
    again, same = timed_together(best, bench, 60.0, Silence())
    assert again is not None and (again.winner, same, bench.opened) == (8, said, [8])
    best[4] = (best[4][0], best[4][1].model_copy(update={"plan": Plan(choices={"layers.1": RECOMPUTE})}))
    timed_together(best, bench, 60.0, Silence())
    assert bench.opened == [8, 8], "another plan is another race"


def test_all_settings_are_put_to_the_conditions_of_the_race() -> None:
    best = {4: found(1.0, 4), 8: found(1.1, 8), 1: found(3.0, 1)}
    raced, _ = timed_together(best, Bench({"4": 4.0, "8": 2.2}), 60.0, Silence())
    assert raced is not None
    usual = best[8][0].model_copy(update={"role": "usual", "score": Measurement(peak_bytes=1, step_seconds=2.2)})
    right = put_right([*(setting for setting, _ in best.values()), usual], raced)
    assert [round(setting.update_seconds, 3) for setting in right] == [4.0, 2.2, round(3 * 8**0.5, 3), 4.4]


def test_a_size_alone_needs_no_race_and_one_that_fails_leaves_a_note() -> None:
    @contextmanager
    def broken(size: int) -> Iterator[Any]:
        raise MeasurementError("the device is gone")
        yield

    assert timed_together({4: found(1.0, 4), 1: found(5.0, 1)}, broken, 60.0, Silence()) == (None, "")
    raced, said = timed_together({4: found(1.0, 4), 8: found(1.0, 8)}, broken, 60.0, Silence())
    assert raced is None and "the device is gone" in said


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_updates_of_all_sizes_run_on_one_model_and_leave_it_as_it_was() -> None:
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    loss = lambda model, batch: model(**batch)  # noqa: E731
    runner = StepRunner(Step(model, {"x": torch.randn(8, 8)}, optimizer=optimizer, loss=loss), get_device("cpu"))
    before = digest_tensors(dict(model.named_parameters()))
    choices = dump_choices({"layers.0": RECOMPUTE})
    plans = {str(rows): {"rows": rows, "accumulate": ROWS // rows, "choices": choices} for rows in (2, 8)}
    times = interleaved(runner, {"plans": plans, "rounds": 3, "first": 0, "budget_bytes": None})
    assert {name: len(taken) for name, taken in times.items()} == {"2": 3, "8": 3}
    assert digest_tensors(dict(model.named_parameters())) == before
    runner.workload = Step(model, {"x": torch.randn(8, 8), "y": torch.zeros(3)}, loss=loss)
    with pytest.raises(MeasurementError, match="cannot be divided"):
        interleaved(runner, {"plans": plans, "rounds": 1, "first": 0, "budget_bytes": None})
    runner.close()
