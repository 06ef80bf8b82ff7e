from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.progress import FIRST_TIME, MOST, LineListener, StageTimes


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOCKPT_CACHE", str(tmp_path))
    return tmp_path / "stage_seconds.json"


def run(subject: str, *stages: tuple[str, int, float], complete: bool = True) -> None:
    """A command whose stages (name, steps, seconds) pass."""
    now = [0.0]
    times = StageTimes(subject, clock=lambda: now[0])
    for name, steps, seconds in stages:
        times.begin(name, steps)
        now[0] += seconds
    times.close(complete)


def expected(subject: str, stage: str, steps: int = 0) -> float | None:
    times = StageTimes(subject, clock=lambda: 0.0)
    times.begin(stage, steps)
    return times.left()


def test_a_stage_takes_about_what_it_took_the_last_time() -> None:
    run("search a", ("trace", 0, 9.0), ("profile", 10, 20.0))
    run("search a", ("trace", 0, 7.0))
    assert expected("search a", "trace") == 7.0 and expected("search a", "profile", 10) == 20.0
    assert expected("search a", "profile", 30) == 60.0, "three times the steps"
    assert expected("search a", "finals") is None


def test_of_something_new_imports_take_what_they_took_for_the_latest_other() -> None:
    run("search a", ("trace", 0, 9.0), ("finals", 0, 60.0))
    assert expected("search b", "finals") is None, "that goes by the model"
    run("search b", ("trace", 0, 4.0))
    assert expected("search c", "trace") == 4.0 and expected("search a", "trace") == 9.0
    run("search a", ("trace", 0, 8.0))
    assert expected("search c", "trace") == 8.0


def test_before_any_command_ran_only_what_imports_take_is_known() -> None:
    assert expected("search a", "trace") == FIRST_TIME["trace"] and expected("search a", "finals") is None


def test_a_stage_that_was_cut_off_tells_nothing() -> None:
    run("search a", ("trace", 0, 9.0), ("profile", 0, 1.0), complete=False)
    assert expected("search a", "trace") == 9.0 and expected("search a", "profile") is None


def test_nothing_is_kept_of_no_subject(cache: Path) -> None:
    run("", ("trace", 0, 9.0))
    assert not cache.exists()


def test_only_the_latest_are_kept(cache: Path) -> None:
    for number in range(MOST + 3):
        run(f"search {number}", ("trace", 0, 1.0))
    kept = list(json.loads(cache.read_text())["subjects"])
    assert len(kept) == MOST and kept[0] == "search 3" and kept[-1] == f"search {MOST + 2}"


@pytest.mark.parametrize("text", ["", "{", '{"subjects": {"search a": {"trace": [-1, 0]}}}', '{"subjects": 3}', "\xff"])
def test_a_cache_that_cannot_be_read_tells_nothing_and_is_written_anew(cache: Path, text: str) -> None:
    cache.write_text(text, encoding="latin-1")
    assert expected("search a", "finals") is None
    run("search a", ("trace", 0, 9.0))
    assert expected("search a", "trace") == 9.0


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOCKPT_CACHE", str(tmp_path / "file"))
    run("search a", ("trace", 0, 9.0))


@given(st.floats(0.1, 100), st.integers(2, 50), st.integers(0, 60), st.floats(0, 200), st.none() | st.floats(0.1, 1000))
def test_what_is_left_is_never_negative_and_known_where_anything_tells(
    each: float, total: int, done: int, since: float, last: float | None
) -> None:
    if last is not None:
        run("search a", ("finals", total, last))
    now = [0.0]
    times = StageTimes("search a" if last is not None else "", clock=lambda: now[0])
    times.begin("finals", total)
    now[0] = each * done
    times.advance(done)
    now[0] += since
    left = times.left()
    by_steps, by_the_last_time = 0 < done < total, last is not None and last > now[0]
    assert (left is not None) == (by_steps or by_the_last_time)
    assert left is None or left > 0
    if by_steps and last is None and since <= each:
        assert left == pytest.approx(max(each, each * (total - done) - since))


def test_steps_count_more_the_more_of_them_are_over() -> None:
    run("search a", ("finals", 4, 40.0))
    now = [0.0]
    times = StageTimes("search a", clock=lambda: now[0])
    times.begin("finals", 4)
    said = []
    for now[0] in (2.0, 4.0, 6.0):
        times.advance(1)
        said.append(times.left())
    # the last time, 40 s, says 38, 36 and 34 s left; the steps 6, 4 and 2 s
    assert said == pytest.approx([30.0, 20.0, 10.0])


def test_lines_say_it_where_nothing_else_is_heard() -> None:
    run("search a", ("trace", 0, 9.0), ("build", 0, 1.0))
    now, said = [0.0], list[str]()
    lines = LineListener(said.append, StageTimes("search a", clock=lambda: now[0]))
    lines.stage("trace")
    for now[0] in (6.0, 17.0):
        lines.pulse()
    lines.stage("build")
    assert [line.partition("] ")[2] for line in said] == [
        "trace … about 9 s",
        "trace: about 3 s left",
        "trace: 17.0 s so far",
        "build …",
    ]
