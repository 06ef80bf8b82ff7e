"""The script for the first contact with a GPU: its arithmetic, its verdicts, and that it continues where it stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.gpu.__main__ as script
from tests.gpu import archive, packages, pages
from tests.gpu.claims import PROMISED, judged
from tests.gpu.items import items_of, read, write
from tests.gpu.kernels import hidden, merged, shared, total
from tests.gpu.runtime import replayed
from tests.gpu.shapes import CARD, TINY

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


def test_a_plan_over_its_budget_fails_and_a_half_empty_one_too():
    def of(**more: Any) -> str:
        return verdict_of({"5-m": job([0.8, 0.8, 0.8], **more)}, "m at 24GB: the plan fills")

    assert of(fill=1.01) == of(fill=0.96) == "failed"
    assert of(fill=0.96, binding=False) == "undecided"


def test_of_many_searches_one_that_is_over_or_half_empty_is_too_many():
    def of(*rows: dict[str, Any]) -> str:
        more = {f"5-searches-{i}": {"rows": {"60%": row}} for i, row in enumerate(rows)}
        return verdict_of({"5-m": job([0.8, 0.8, 0.8])} | more, "of 20 searches")

    good = {"state": "fits", "fill": 0.98, "binding": True}
    assert of(*[good] * 18) == "undecided"
    assert of(*[good] * 19) == of(*[good] * 18, good | {"fill": 0.5, "binding": False}) == "passed"
    assert of(good | {"fill": 1.001}) == of({"state": "out of memory"}) == of(good | {"fill": 0.96}) == "failed"
    assert of(*[good] * 18, {"message": "nothing fits", "binding": None}) == "undecided"


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
def test_copies_are_hidden_where_every_profile_says_so_and_the_link_allows_it(hidden, allowed, wanted):
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


def test_predicted_peaks_are_judged_by_median_and_worst():
    assert verdict_of(foresight(1.04), "reserved peak") == "passed"
    assert verdict_of(foresight(1.04, models=3), "reserved peak") == "undecided"
    assert verdict_of(foresight(1.06, models=1), "reserved peak") == "failed"
    off = {slug: {"rows": {"all": data["rows"]["all"]}} for slug, data in foresight(1.03).items()}
    assert verdict_of(off, "reserved peak") == "failed"  # none is far off, but most are


@pytest.mark.parametrize(
    ("guess", "between", "wanted"),
    [
        (1.0, (0.99, 1.01), "passed"),
        (1.045, (0.99, 1.01), "undecided"),
        (1.07, (0.99, 1.01), "failed"),
        (1.07, (0.9, 1.1), "undecided"),
    ],
)
def test_predicted_times_are_judged_by_the_interval_of_what_was_measured(guess, between, wanted):
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


@pytest.mark.parametrize(
    ("micros", "noise", "wanted"), [(90, 0.05, "passed"), (99, 0.05, "undecided"), (150, 0.05, "failed")]
)
def test_host_time_is_judged_beside_the_kernels_of_a_layer(micros, noise, wanted):
    counted = {"kernels": 0, "attentions kept": 0, "of these once more": 0}
    plans = ("save everything", "recompute all", "keep attention")
    attention = {"layers": 10, "rows": {plan: counted | {"device seconds": 1e-3} for plan in plans}}
    rows = {"remake": {"forward": micros / 2, "backward": micros / 2, "noise": noise}}
    rows["torch.utils.checkpoint by hand"] = {"forward": 1e3, "backward": 1e3, "noise": 0.0}
    assert verdict_of({"1-host-cost": {"rows": rows}, "1-attention": attention}, "keeps the host") == wanted


def test_a_history_of_requests_is_held_against_the_simulated_allocator():
    """Two segments, one of them given back, a block of each freed and another in its place."""
    large, small = 30 << 20, 4096
    history = [
        ("segment_alloc", 0, large, 0),
        ("alloc", 0, large, 0),
        ("segment_alloc", 1 << 40, 2 << 20, 0),
        ("alloc", 1 << 40, small, 0),
        ("snapshot", 0, 0, 0),
        ("free_requested", 0, large, 0),
        ("free_completed", 0, large, 0),
        ("alloc", 0, large - (2 << 20), 0),
        ("free_completed", 0, large - (2 << 20), 0),
        ("segment_free", 0, large, 0),
        ("segment_alloc", 2 << 40, 20 << 20, 3),  # another stream finds nothing of what the first one left
        ("alloc", 2 << 40, 3 << 20, 3),
    ]
    most = large + (2 << 20)
    wanted = {"requests": 4, "different": 0, "most reserved": most, "most reserved, simulated": most}
    assert replayed(history) == wanted
    assert replayed([*history[:2], *history[3:]])["different"] == 3
    row = {"1-allocator": {"rows": {"all": wanted}}}
    assert verdict_of(row, "simulated allocator") == "passed"
    row["1-allocator"]["rows"]["all"] = wanted | {"different": 1}
    assert verdict_of(row, "simulated allocator") == "failed"


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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_an_item_and_what_it_started_go_with_a_script_that_is_killed():
    item = "import subprocess, time; from tests.gpu.child import go_with_parent; go_with_parent(); "
    item += "subprocess.Popen(['sleep', '60']); print('begun', flush=True); time.sleep(60)"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {item!r}], start_new_session=True)"
    killed = subprocess.Popen([sys.executable, "-c", starts], cwd=script.ROOT, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None and killed.stdout.readline() == "begun\n"
    killed.kill()
    assert killed.communicate(timeout=30) == ("", None)  # as soon as nobody has the pipe any more


@pytest.mark.parametrize("how", ["folder", "archive", "archive in a folder"])
def test_an_earlier_call_is_taken_over_but_never_over_what_is_here(tmp_path, how):
    first, second = items_of(TINY)[:2]
    earlier, out = tmp_path / "earlier", tmp_path / "out"
    for folder, state in ((earlier, "failed"), (out, "done")):
        write(folder, first, {"state": state})
    write(earlier, second, {"state": "done"})
    (earlier / "a.log").write_text("x" * 300_000 + "the end")
    for left_out in ("packages/python3.12/x.py", "cache/x.json"):
        (earlier / left_out).parent.mkdir(parents=True)
        (earlier / left_out).write_text("{}")
    if how != "folder":
        packed = archive.pack(earlier)
        (tmp_path / "alone").mkdir()
        packed.rename(tmp_path / "alone" / archive.NAME)
        earlier = tmp_path / "alone" / (archive.NAME if how == "archive" else "")
    assert archive.take_over(earlier, out)
    assert [read(out, item)["state"] for item in (first, second)] == ["done", "done"]
    assert (out / "a.log").read_text().endswith("the end")
    assert not (out / "packages").exists() and not (out / "cache").exists()


def test_an_earlier_call_that_is_not_there_is_an_error(tmp_path, capsys):
    (tmp_path / "no.zip").write_text("no archive")
    for name in ("nothing", "no.zip"):
        assert script.main(["--earlier", str(tmp_path / name), "--out", str(tmp_path / "out")]) == 2
        assert "no such folder, and no archive" in capsys.readouterr().err


def wheel(folder: Path, name: str, version: str, *asked: str, tag: str = "py3-none-any") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {a}" for a in asked)]
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(f"{name}/__init__.py", f"version = {version!r}")
        made.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")
        made.writestr(f"{name}-{version}.data/purelib/{name}_more.py", "")
        made.writestr(f"{name}-{version}.data/scripts/{name}", "")
    return path


def test_everything_that_is_missing_is_said_at_once_and_what_wheels_ask_for_is_followed(tmp_path, monkeypatch):
    installed = {"torch": ("2.13.0+cpu", ["vendors-own", "old>=2"]), "typing-extensions": ("4.12.0", [])}
    installed["old"] = "1.0", []
    monkeypatch.setattr(packages, "_installed", installed.get)
    wheels = tmp_path / "wheels"
    wheel(wheels, "made_up", "1.0", "typing-extensions>=4.16", "nowhere<2", 'never; extra == "x"', "torch>=2")
    wheel(wheels, "made_up", "2.0", tag="cp39-cp39-win32")  # newer, for another Python
    older = wheel(wheels, "typing_extensions", "4.16.0")
    newer = wheel(wheels, "typing_extensions", "4.17.0")
    wheel(wheels, "torch", "3.0")
    wheel(wheels, "old", "2.0")
    found = packages.wanted(["torch>=2.11", "made-up", "scipy>=1.11"], wheels)
    assert set(found.wheels) == {"made-up", "typing-extensions", "old"}  # PyTorch is new enough, so it stays
    assert found.wheels["typing-extensions"] == newer != older
    assert found.missing == {"scipy>=1.11": "autockpt", "nowhere<2": "made-up"}
    assert "scipy>=1.11 (for autockpt), nowhere<2 (for made-up)" in found.words and "pip download" in found.words
    assert packages.wanted(["torch", "made-up"], None).missing == {"made-up": "autockpt"}
    target = packages.unpack(found.wheels, tmp_path)
    assert (target / "made_up/__init__.py").exists() and (target / "made_up_more.py").exists()
    assert not (target / "scripts").exists() and not list(target.glob("*.data"))
    (target / "made_up/__init__.py").write_text("kept")
    assert packages.unpack(found.wheels, tmp_path) == target and (target / "made_up/__init__.py").read_text() == "kept"


def test_unpacked_packages_come_before_all_but_this_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    paths = script._environment(tmp_path, tmp_path / "packages")["PYTHONPATH"].split(os.pathsep)
    assert paths == [str(script.ROOT), str(tmp_path / "packages"), "/elsewhere"]


def test_what_pyproject_asks_for_is_what_is_looked_for():
    needs = {name for shapes in (CARD, TINY) for item in items_of(shapes) for name in item.needs}
    assert needs == {"pytest", "hypothesis", "peft"}  # of the contract suite, and of jobs with LoRA
    asked = packages.requirements(needs)
    names = {name.partition(">")[0] for name in asked}
    assert needs | {"torch", "transformers", "optuna", "pydantic", "scipy", "typer"} <= names
    assert not packages.wanted(asked, None).missing  # these tests run with all of them
    assert not needs & {name.partition(">")[0] for name in packages.requirements(())}


@pytest.mark.slow
def test_a_module_that_cannot_be_imported_is_said_before_anything_runs(monkeypatch):
    monkeypatch.setattr(packages, "MODULES", ("json", "no_such_module", "nor_such_a_one"))
    found = packages.warmed(dict(os.environ), ())
    assert list(found["missing"]) == ["no_such_module", "nor_such_a_one"]
    assert found["missing"]["no_such_module"].startswith("no_such_module (ModuleNotFoundError: ")
    assert found["seconds"] >= 0


def test_a_package_that_is_broken_keeps_only_those_from_running_that_need_it(tmp_path, monkeypatch, capsys):
    broken = {"missing": {"peft": "peft (ImportError: of another version)"}, "devices": 0, "seconds": 0.0}
    monkeypatch.setattr(packages, "warmed", lambda environment, more: broken)
    ran: list[str] = []
    monkeypatch.setattr(script, "_run", lambda item, *_: ran.append(item.slug))
    assert script.main(["--shapes", "tiny", "--out", str(tmp_path)]) == 1
    slugs = [item.slug for item in items_of(TINY) if "peft" not in item.needs]
    assert ran == slugs and len(slugs) < len(items_of(TINY))
    assert "1-contract: not begun, peft (ImportError: of another version)" in capsys.readouterr().out


def test_a_page_that_cannot_be_drawn_loses_nothing_and_the_archive_lies_where_it_is_wanted(tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise KeyError("rows")

    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    write(out, items_of(TINY)[0], {"state": "done"})
    monkeypatch.setattr(pages, "write", fail)
    script.main(["--shapes", "tiny", "--pages", "--out", str(out), "--copy", str(elsewhere)])
    with zipfile.ZipFile(elsewhere / archive.NAME) as copied:
        assert {f"{items_of(TINY)[0].slug}.json", "pages.log"} <= set(copied.namelist())


def test_wrong_parts_are_refused(capsys):
    assert script.main(["--parts", "1,9"]) == 2
    assert "numbers from 1 to 6" in capsys.readouterr().err
    assert script.main(["--only", "no-such-item"]) == 2
    assert "all: 1-attention, 1-bits" in capsys.readouterr().err


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


def test_a_row_that_runs_out_of_memory_in_turns_leaves_and_the_others_begin_anew():
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
