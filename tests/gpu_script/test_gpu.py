"""The script for the first contact with a GPU: its arithmetic, its verdicts, and that it continues where it stopped."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import results.gpu.__main__ as script
from results.gpu import pages
from results.gpu.claims import judged
from results.gpu.items import items_of, read, write
from results.gpu.kernels import hidden, merged, shared, total
from results.gpu.shapes import CARD, TINY

spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda s: (float(s[0]), float(s[0] + s[1]))), max_size=12
)


@given(spans, spans)
def test_what_two_sets_of_intervals_share_is_what_counting_seconds_says(a, b):
    def covered(intervals):
        return {t for begin, end in intervals for t in range(int(begin), int(end))}

    assert total(merged(a)) == len(covered(a))
    assert shared(a, b) == len(covered(a) & covered(b)) == shared(b, a)


def test_hidden_copies():
    assert hidden([(0.0, 4.0), (2.0, 6.0)], [(3.0, 9.0)]) == 0.5
    assert hidden([], [(0.0, 1.0)]) is None


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {claim.text.split(": ")[-1][:24]: claim.verdict for claim in judged(found)}


def test_what_was_not_measured_is_undecided():
    assert {claim.verdict for claim in judged({})} == {"undecided"}


def job(ratio: list[float], *, fill: float = 0.97, state: str = "fits") -> dict[str, Any]:
    rows: dict[str, Any] = {
        "ours": {"state": state, "peak": 97, "step": 0.8, "noise": 0.01, "fill": fill},
        "recompute all": {"state": "fits", "peak": 60, "step": 1.0, "noise": 0.01, "ours over it": ratio},
    }
    found = {"search": {"binding": True, "notes": []}, "rows": rows}
    return {"spec": {"model": "m"}, "middle": "24GB", "budgets": {"24GB": found}}


@pytest.mark.parametrize(
    ("ratio", "fastest", "beaten"),
    [
        ([0.78, 0.80, 0.82], "passed", "passed"),
        ([0.89, 0.90, 0.92], "passed", "undecided"),
        ([0.93, 0.95, 0.97], "passed", "failed"),
        ([1.01, 1.02, 1.03], "failed", "failed"),
    ],
)
def test_the_main_jobs_verdicts(ratio, fastest, beaten):
    found = verdicts({"5-m": job(ratio)})
    assert (found["ours is the fastest of t"], found["recompute-all is beaten "]) == (fastest, beaten)
    assert found["the plan fills at least "] == "passed"


def test_a_plan_over_its_budget_fails_and_a_half_empty_one_too():
    def of(**more: Any) -> str:
        return next(c.verdict for c in judged({"5-m": job([0.8, 0.8, 0.8], **more)}) if "fills" in c.text)

    assert of(fill=1.01) == of(fill=0.8) == "failed"


def test_copies_that_cannot_fit_beside_compute_decide_nothing():
    row = {"hidden": 0.3, "link allows it": False}
    text = "offload hides at least 90 % of its copy time where the link's bandwidth allows"
    for allowed, share, wanted in ((False, 0.3, "undecided"), (True, 0.3, "failed"), (True, 0.95, "passed")):
        data = {"rows": {"offload all": row | {"link allows it": allowed, "hidden": share}}}
        assert {c.text: c.verdict for c in judged({"2-overlap": data})}[text] == wanted


def test_stress_proves_nothing_where_plain_training_varies():
    rows = {"offload all": {"steps": 10, "unequal steps": 0}}
    text = "offloading uses nothing after it was freed: gradients bit-equal at every step under pressure"
    for repeats, wanted in ((True, "passed"), (False, "undecided")):
        data = {"repeats": repeats, "rows": rows}
        assert {c.text: c.verdict for c in judged({"2-stress": data})}[text] == wanted


def test_slugs_are_unique_and_all_items_are_functions_of_the_script():
    import importlib

    for shapes in (CARD, TINY):
        items = items_of(shapes)
        assert len({item.slug for item in items}) == len(items)
        assert {item.part for item in items} == set(range(1, 7))
        for item in items:
            module, _, name = item.function.partition(":")
            assert callable(getattr(importlib.import_module(module), name))


def test_each_item_fits_into_one_call():
    assert all(item.least <= item.limit <= 540 for item in items_of(CARD))


def test_pages_of_nothing_and_of_a_part(tmp_path):
    pages.write(tmp_path, TINY, "tiny")
    text = (tmp_path / "summary.md").read_text()
    assert "No GPU took part" in text
    assert "not run" in text
    item = next(item for item in items_of(TINY) if item.function.endswith(":job"))
    write(tmp_path, item, {"state": "out of time", "data": {"spec": {"model": "m"}, "budgets": {}}})
    pages.write(tmp_path, TINY, "tiny")
    assert "out of time" in (tmp_path / "part5.md").read_text()


def test_what_is_done_is_skipped_and_what_died_is_said(tmp_path, monkeypatch, capsys):
    items = items_of(TINY)[:2]
    write(tmp_path, items[0], {"state": "done", "data": {}})
    monkeypatch.setattr(script.sys, "executable", "/bin/false")
    script._run_all(items, "tiny", tmp_path, {}, minutes=5, fresh=False)
    said = capsys.readouterr().out
    assert f"{items[0].slug}: done before" in said
    assert read(tmp_path, items[1])["state"] == "failed"
    script._run_all(items[1:], "tiny", tmp_path, {}, minutes=0.1, fresh=False)
    assert "not begun" in capsys.readouterr().out


def test_an_item_that_takes_too_long_is_ended_with_what_it_kept(tmp_path, monkeypatch):
    item = items_of(TINY)[0]
    slow = tmp_path / "slow"
    kept = json.dumps({"state": "partial", "data": {"rows": {"a": {}}}})
    slow.write_text(f"#!/bin/sh\necho '{kept}' > {tmp_path}/{item.slug}.json\nsleep 60 & wait\n")
    slow.chmod(0o755)
    monkeypatch.setattr(script.sys, "executable", str(slow))
    script._run(item, "tiny", tmp_path, {"PATH": "/usr/bin:/bin"}, 1.0)
    found = read(tmp_path, item)
    assert (found["state"], found["data"]) == ("out of time", {"rows": {"a": {}}})


def test_an_earlier_call_is_taken_over_but_never_over_what_is_here(tmp_path):
    earlier, out = tmp_path / "earlier", tmp_path / "out"
    for folder, state in ((earlier, "failed"), (out, "done")):
        write(folder, items_of(TINY)[0], {"state": state})
    write(earlier, items_of(TINY)[1], {"state": "done"})
    script._take_over(earlier, out)
    assert [read(out, item)["state"] for item in items_of(TINY)[:2]] == ["done", "done"]


def test_wrong_parts_are_refused(capsys):
    assert script.main(["--parts", "1,9"]) == 2
    assert "numbers from 1 to 6" in capsys.readouterr().err


@pytest.mark.parametrize("shapes", [CARD, TINY], ids=["card", "tiny"])
def test_every_workload_and_budget_can_be_asked_for(shapes):
    from autockpt.schema import WorkloadSpec, parse_budget
    from search_spaces.shapes import load_model_shape

    specs = [shapes.attention, shapes.overlap, shapes.stress, *shapes.foresight.values()]
    specs += [task.spec for task in shapes.tasks.values()]
    for spec in specs:
        assert load_model_shape(WorkloadSpec.model_validate(spec).model)
    for task in shapes.tasks.values():
        assert [parse_budget(budget) for budget in task.budgets]
        assert task.middle in ("", *task.budgets)


def test_a_row_that_runs_out_of_memory_in_turns_leaves_and_the_others_begin_anew():
    from autockpt.errors import DeviceOutOfMemory
    from results.gpu.jobs import _in_turns

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
