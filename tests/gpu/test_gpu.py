"""The script for the first contact with a GPU: its arithmetic, its verdicts, and that it continues where it stopped."""

from __future__ import annotations

import json
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

import tests.gpu.__main__ as script
from tests.gpu import packages
from tests.gpu.claims import PROMISED, judged
from tests.gpu.items import items_of, read, write
from tests.gpu.kernels import hidden
from tests.gpu.shapes import CARD, TINY


def test_hidden_copies():
    assert hidden([(0.0, 4.0), (2.0, 6.0)], [(3.0, 9.0)]) == 0.5
    assert hidden([], [(0.0, 1.0)]) is None


def verdict_of(found: dict[str, Any], words: str) -> str:
    """Of the one claim with these words."""
    (claim,) = [claim for claim in judged(found) if words in claim.text]
    return claim.verdict


def test_what_was_not_measured_is_undecided():
    claims = judged({})
    assert {claim.verdict for claim in claims} == {"undecided"}
    texts = {claim.text for claim in claims}
    assert len(texts) == len(claims)
    for job in ("llama-1b-default-shape at 24GB", "long-sequence at 80GB", "large-batch at 40GB"):
        assert f"{job}: ours is the fastest of the rows that fit" in texts
    tasks = {f"{task.part}-{name.replace(' ', '-')}": task.budgets for name, task in CARD.tasks.items()}
    assert all(budget in tasks[slug] for slug, budget in PROMISED.items())


def job(ratio: list[float], *, fill: float = 0.98, state: str = "fits", binding: bool = True) -> dict[str, Any]:
    rows: dict[str, Any] = {
        "ours": {"state": state, "peak": 97, "step": 0.8, "noise": 0.01, "fill": fill},
        "recompute all": {"state": "fits", "peak": 60, "step": 1.0, "noise": 0.01, "ours over it": ratio},
        "our offload all": {
            "state": "fits",
            "peak": 60,
            "step": 1.1,
            "noise": 0.01,
            "ours over it": [0.99, 0.99, 0.99],
        },
    }
    found = {"search": {"binding": binding, "notes": []}, "rows": rows}
    return {"spec": {"model": "m"}, "middle": "24GB", "budgets": {"24GB": found}}


@pytest.mark.parametrize(
    ("ratio", "fastest", "ahead"),
    [
        ([0.78, 0.80, 0.82], "passed", "passed"),
        ([0.90, 0.91, 0.93], "passed", "undecided"),
        ([0.93, 0.95, 0.97], "passed", "failed"),
        ([1.01, 1.02, 1.03], "failed", "failed"),
    ],
)
def test_the_main_jobs_verdicts(ratio, fastest, ahead):
    found = {"5-llama-1b-default-shape": job(ratio)}
    where = "llama-1b-default-shape at 24GB: "
    assert verdict_of(found, f"{where}ours is the fastest") == fastest
    assert verdict_of(found, f"{where}our step takes") == ahead
    assert verdict_of(found, f"{where}the plan fills at least 97%") == "passed"


@pytest.mark.parametrize(
    ("hidden", "allowed", "wanted"),
    [
        ([0.3, 0.3], False, "undecided"),
        ([0.90, 0.94], True, "failed"),
        ([0.94, 0.97], True, "undecided"),
        ([0.95, 0.97], True, "passed"),
        ([None, None], True, "undecided"),
    ],
)
def test_copies_are_hidden_where_profiles_and_link_allow_it(hidden, allowed, wanted):
    data = {"rows": {"offload all": {"hidden": hidden, "link allows it": allowed}}}
    assert verdict_of({"2-overlap": data}, "of its copy time") == wanted


def foresight(guess: float, between: tuple[float, float] = (0.99, 1.01), models: int = 4) -> dict[str, Any]:
    row = {
        "reserved, predicted": guess * 100,
        "reserved": 100,
        "step, predicted": guess,
        "step": 1.0,
        "step between": list(between),
    }
    good = {"reserved, predicted": 101, "reserved": 100}
    return {f"4-{i}": {"rows": {"all": row, "none": good, "some": good}} for i in range(models)}


@pytest.mark.parametrize(
    ("guess", "between", "wanted"),
    [
        (1.0, (0.99, 1.01), "passed"),
        (1.045, (0.99, 1.01), "undecided"),
        (1.07, (0.99, 1.01), "failed"),
        (1.07, (0.9, 1.1), "undecided"),
    ],
)
def test_predicted_times_are_judged_by_measured_intervals(guess, between, wanted):
    assert verdict_of(foresight(guess, between), "step time") == wanted


def test_gradients_are_judged_by_what_they_are_compared_under():
    by = {"fp32": {"passed": 9, "failed": 0}, "autocast": {"passed": 8, "failed": 1}}
    data = {"tests": 18, "skipped": 0, "lost": 0, "by": by}
    suite = {"1-contract": data}
    assert [verdict_of(suite, f"suite, {g}") for g in ("fp32", "autocast", "dropout")] == [
        "passed",
        "failed",
        "undecided",
    ]
    assert verdict_of({"1-contract": data | {"lost": 1}}, "suite, fp32") == "undecided"
    row = {"repeats": True, "values": 5, "unequal": 0}
    rows = {"bf16: save": row, "bf16: remake": row | {"unequal": 2}, "fp32: save": row, "fp32: segment": row}
    rows["fp32: segment"] = row | {"values": 0}  # refused by name
    assert verdict_of({"1-bits": {"rows": rows}}, "sizes, bf16") == "failed"
    assert verdict_of({"1-bits": {"rows": rows}}, "sizes, fp32") == "passed"
    rows["fp32: save"] = row | {"repeats": False}
    assert verdict_of({"1-bits": {"rows": rows}}, "sizes, fp32") == "undecided"


def test_each_item_fits_into_one_call():
    assert all(item.least <= item.limit <= 540 for item in items_of(CARD))


def test_what_is_done_is_skipped_and_what_died_is_said(tmp_path, monkeypatch, capsys):
    items = items_of(TINY)[:2]
    write(tmp_path, items[0], {"state": "done", "data": {}})
    monkeypatch.setattr(script.sys, "executable", "/bin/false")
    kept: list[int] = []
    now = time.monotonic()
    script._run_all(items, "tiny", tmp_path, {}, now + 300, fresh=False, keep=lambda: kept.append(1))
    said = capsys.readouterr().out
    assert f"{items[0].slug}: done before" in said
    assert read(tmp_path, items[1])["state"] == "failed"
    assert kept == [1]  # after what was run, so that a call that is cut off leaves an archive, too
    script._run_all(items[1:], "tiny", tmp_path, {}, now + 6, fresh=False, keep=lambda: None)
    assert "not begun" in capsys.readouterr().out


@pytest.mark.slow
def test_an_item_that_takes_too_long_is_ended_with_what_it_kept(tmp_path, monkeypatch):
    item = items_of(TINY)[0]
    slow = tmp_path / "slow"
    kept = json.dumps({"state": "partial", "data": {"rows": {"a": {}}}})
    slow.write_text(f"#!/bin/sh\necho '{kept}' > {tmp_path}/{item.slug}.json\nsleep 60 & wait\n")
    slow.chmod(0o755)
    monkeypatch.setattr(script.sys, "executable", str(slow))
    monkeypatch.setattr(script, "KEEP_SECONDS", 0.1)
    looked: list[bool] = []
    script._run(
        item, "tiny", tmp_path, {"PATH": "/usr/bin:/bin"}, 1.0, lambda: looked.append(bool(read(tmp_path, item)))
    )
    assert looked[-1]  # what it has so far is kept while it runs
    found = read(tmp_path, item)
    assert (found["state"], found["data"]) == ("out of time", {"rows": {"a": {}}})


def wheel(folder: Path, name: str, version: str, *, tag: str = "py3-none-any") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(f"{name}/__init__.py", f"version = {version!r}")
        made.writestr(f"{name}-{version}.data/purelib/{name}_more.py", "")
        made.writestr(f"{name}-{version}.data/scripts/{name}", "")
    return path


def test_the_newest_wheel_that_fits_is_unpacked_once(tmp_path):
    wheels = tmp_path / "wheels"
    wheel(wheels, "made_up", "1.0")
    wheel(wheels, "made_up", "3.0", tag="cp39-cp39-win32")  # newer, for another Python
    wheel(wheels, "made_up", "2.0")
    target, taken = packages.unpack(wheels, tmp_path)
    assert taken == ["made_up-2.0-py3-none-any.whl"]
    assert (target / "made_up/__init__.py").exists() and (target / "made_up_more.py").exists()
    assert not (target / "scripts").exists() and not list(target.glob("*.data"))
    (target / "made_up/__init__.py").write_text("kept")
    packages.unpack(wheels, tmp_path)
    assert (target / "made_up/__init__.py").read_text() == "kept"


@pytest.mark.parametrize("shapes", [CARD, TINY], ids=["card", "tiny"])
def test_every_workload_and_budget_can_be_asked_for(shapes):
    from autockpt.schema import WorkloadSpec, parse_budget
    from autockpt.shipped import load_model_shape

    specs = [shapes.attention, shapes.overlap, shapes.stress, *shapes.foresight.values(), *shapes.bits.values()]
    specs += [spec for spec, _ in shapes.searches.values()]
    specs += [task.spec for task in shapes.tasks.values()]
    for spec in specs:
        assert load_model_shape(WorkloadSpec.model_validate(spec).model)
    for task in shapes.tasks.values():
        assert [parse_budget(budget) for budget in task.budgets]
        assert task.middle in ("", *task.budgets)


def test_a_row_that_runs_out_of_memory_leaves_the_others():
    from autockpt.errors import DeviceOutOfMemory
    from tests.gpu.jobs import _in_turns

    class Runner:
        def compare(self, plans: dict[str, Any], *, rounds: int, budget_bytes: int) -> dict[str, list[float]]:
            if "tight" in plans:
                raise DeviceOutOfMemory("plan 'tight' ran out of memory on cuda:0")
            return dict.fromkeys(plans, [1.0] * rounds)

    found = {name: {"state": "fits"} for name in ("none", "tight")}
    rows: Any = dict.fromkeys(found)
    runner: Any = Runner()
    assert _in_turns(runner, rows, found, 100, 3) == {"none": [1.0, 1.0, 1.0]}
    assert found["tight"]["state"] == "out of memory"
