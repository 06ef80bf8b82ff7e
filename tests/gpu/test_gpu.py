"""The script for the first contact with a GPU: its arithmetic, and that it continues where it stopped."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

import tests.gpu.__main__ as script
from autockpt.devices import get_device
from autockpt.process import Child, child_environment
from tests.gpu import child
from tests.gpu.contract import FILES
from tests.gpu.items import Context, Item, items_of, read, write
from tests.gpu.kernels import hidden
from tests.gpu.shapes import CARD, TINY


def test_hidden_copies():
    assert hidden([(0.0, 4.0), (2.0, 6.0)], [(3.0, 9.0)]) == 0.5
    assert hidden([], [(0.0, 1.0)]) is None


def test_each_item_fits_into_one_call():
    assert all(item.least <= item.limit <= 540 for item in items_of(CARD))


def test_the_tests_of_the_contract_item_are_there():
    for path, _, name in (file.partition("::") for file in FILES):
        assert f"def {name}" in (script.ROOT / path).read_text()


def test_what_is_done_is_skipped_and_what_died_is_said(tmp_path, monkeypatch, capsys):
    items = items_of(TINY)[:2]
    write(tmp_path, items[0], {"state": "done", "data": {}})
    monkeypatch.setattr(script.sys, "executable", "/bin/false")
    kept: list[int] = []
    now = time.monotonic()
    runs = script.Runs("tiny", tmp_path, {}, lambda: kept.append(1))
    runs.all(items, now + 300, fresh=False)
    said = capsys.readouterr().out
    assert f"{items[0].slug}: done before" in said
    assert read(tmp_path, items[1])["state"] == "failed"
    assert kept == [1]  # after what was run, so that a call that is cut off leaves an archive, too
    runs.all(items[1:], now + 6, fresh=False)
    assert "not begun" in capsys.readouterr().out


def slow(context: Context) -> dict[str, Any]:
    context.keep({"rows": {"a": {}}})
    time.sleep(60)
    return {}


@pytest.mark.slow
def test_an_item_that_takes_too_long_is_ended_with_what_it_kept(tmp_path, monkeypatch):
    def spawn(module: str, **_: Any) -> Child:
        return Child.fork(lambda theirs: child.main(theirs.fileno()))  # which is there at once

    monkeypatch.setattr(script, "Child", SimpleNamespace(spawn=spawn))
    item = Item(1, "slow", f"{__name__}:slow", 60)
    kept: list[str] = []
    runs = script.Runs("tiny", tmp_path, child_environment(), lambda: kept.append(read(tmp_path, item)["state"]))
    runs.one(item, 1.0)
    found = read(tmp_path, item)
    assert (found["state"], found["data"]) == ("out of time", {"rows": {"a": {}}})
    assert kept == ["partial", "out of time"]  # what it has so far is on the pages while it runs


@pytest.mark.parametrize("shapes", [CARD, TINY], ids=["card", "tiny"])
def test_every_workload_and_budget_can_be_asked_for(shapes):
    from autockpt.schema import WorkloadSpec, parse_budget
    from autockpt.shipped import load_model_shape
    from autockpt.workload.factory import is_factory

    specs = [shapes.kernels, shapes.overlap, shapes.stress, *shapes.foresight.values(), *shapes.bits.values()]
    specs += [spec for spec, _ in shapes.searches.values()]
    specs += [task.spec for task in shapes.tasks.values()]
    for spec in specs:
        model = WorkloadSpec.model_validate(spec).model
        assert is_factory(model) or load_model_shape(model)
    for task in shapes.tasks.values():
        assert [parse_budget(budget) for budget in task.budgets]


def test_a_row_that_runs_out_of_memory_leaves_the_others():
    from autockpt.errors import DeviceOutOfMemory
    from tests.gpu.jobs import _in_turns

    class Runner:
        device = get_device("cpu")

        def compare(self, plans: dict[str, Any], *, rounds: int) -> dict[str, list[float]]:
            if "tight" in plans:
                raise DeviceOutOfMemory("plan 'tight' ran out of memory on cuda:0")
            return dict.fromkeys(plans, [1.0] * rounds)

    found = {name: {"state": "fits"} for name in ("none", "tight")}
    rows: Any = dict.fromkeys(found)
    runner: Any = Runner()
    assert _in_turns(runner, rows, found, 100, 3) == {"none": [1.0, 1.0, 1.0]}
    assert found["tight"]["state"] == "out of memory"
