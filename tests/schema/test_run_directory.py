import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import autockpt
from autockpt.errors import RunDirectoryError
from autockpt.schema import (
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    Choice,
    DeviceInfo,
    Environment,
    Graph,
    Measurement,
    Op,
    Plan,
    Storage,
    Trial,
    Unit,
    plan_hash,
    question_hash,
)
from autockpt.schema.graph import TensorMeta, Work
from autockpt.schema.run_directory import RunDirectory, directory_name, pareto_front, ranking
from tests import samples
from tests.analysis.samples import make_run
from tests.errors import raises

QUESTION = {"budget": "60%", "workload": {"model": "llama-tiny"}, "seed": 0}


def enter(root: Path, question: dict | None = None, fresh: bool = False) -> RunDirectory:
    question = question or QUESTION
    return RunDirectory.enter(root / directory_name("llama-tiny", "cpu", "60%", question), question, fresh=fresh)


def trial(number: int, seconds: float = 0.1) -> Trial:
    choices: dict[str, Choice] = {"h.0": RECOMPUTE, "h.1": SAVE, "h.2": OFFLOAD}
    measured = Measurement(peak_bytes=11, step_seconds=seconds, times=(0.1, 0.2))
    return samples.trial(number, choices=choices, plan_hash=plan_hash(choices), measured=measured)


def plan(choice: Choice = RECOMPUTE) -> Plan:
    units = [Unit(name=f"h.{i}", cls="Block", kind=0) for i in range(3)]
    measured = Measurement(peak_bytes=11, step_seconds=0.1)
    return Plan.create({"h.0": choice, "h.1": SAVE, "h.2": SAVE}, units, source="measured", measured=measured)


@pytest.mark.parametrize(
    ("model", "device", "budget", "name"),
    [
        ("llama-tiny", "cpu", "60%act", "llama-tiny_cpu_60pct-act"),
        ("meta-llama/Llama-3.2-1B", "cuda", "24GB", "meta-llama-Llama-3.2-1B_cuda_24GB"),
        ("../../etc/passwd", "cuda:1", "auto", "passwd_cuda-1_auto"),
        ("a/long/way/to/six_layers.json", "cpu", "1GB", "six-layers_cpu_1GB"),
        ("/models/my-llama/config.json", "cpu", "1GB", "my-llama_cpu_1GB"),
        ("./config.json", "cpu", "1GB", "here_cpu_1GB"),
        (".", "cpu", "1GB", "here_cpu_1GB"),
        ("my_pkg.mod:make_model", "cpu", "1GB", "my-pkg.mod-make-model_cpu_1GB"),
        ("m" * 500, "cpu", "1GB", f"{'m' * 40}_cpu_1GB"),
    ],
)
def test_names_are_readable_and_safe(
    model: str, device: str, budget: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert directory_name(model, device, budget, {}) == f"{name}_{question_hash({})}"


@given(st.text(max_size=60))
def test_any_model_name_makes_one_path_component(model: str) -> None:
    name = directory_name(model, "cpu", "60%", {})
    assert Path(name).name == name and name.count("_") == 3 and not name.startswith((".", "-"))


def test_the_same_question_continues(tmp_path: Path) -> None:
    first = enter(tmp_path)
    first.add_trial(trial(0))
    again = enter(tmp_path)
    assert again.path == first.path and again.trials() == [trial(0)]
    assert enter(tmp_path, QUESTION | {"seed": 1}).path != first.path
    assert RunDirectory.open(first.path).question == QUESTION


def test_everything_written_is_read_back(tmp_path: Path) -> None:
    run = enter(tmp_path)
    device = DeviceInfo(kind="cpu", name="a processor", capacity_bytes=2**34)
    environment = Environment(device=device, versions={"torch": "2.13.0"})
    out = TensorMeta(shape=(2,), stride=(1,), dtype="float32", storage=0)
    op = Op(index=0, target="aten.mm.default", phase="forward", module="h.0", unit="h.0", signature=0, outputs=(out,))
    graph = Graph(
        resident_bytes=5,
        signatures=("mm",),
        work=(Work("matrix", "mm"),),
        ops=(op,),
        storages=(Storage(id=0, bytes=8, birth=0, death=None),),
    )
    assert run.environment() is None and run.graph() is None and run.profile() is None and run.plan() is None
    run.write_environment(environment)
    run.write_graph(graph)
    run.write_plan(plan())
    run.add_command(["autockpt", "search", "--budget", "60%", "--out", "my results"])
    run.add_command(["autockpt", "search", "--budget", "60%", "--out", "my results"])
    read = RunDirectory.open(run.path)
    assert read.environment() == environment and read.graph() == graph and read.plan() == plan()
    assert read.command() == "autockpt search --budget 60% --out 'my results'\n"
    run.add_command(["autockpt", "search", "--storage", "postgresql://me:hunter2@host/db?a=1&sslpassword=hunter2"])
    assert read.command().endswith("\nautockpt search --storage 'postgresql://me:***@host/db?a=1&sslpassword=***'\n")
    assert read.storage == f"sqlite:///{run.path.resolve()}/study.db"


def test_every_run_has_an_id_that_stays_with_it(tmp_path: Path) -> None:
    first, second = enter(tmp_path / "a"), enter(tmp_path / "b")
    known, other = first.id, second.id
    assert known != other and enter(tmp_path / "a").id == known
    assert RunDirectory.open(first.path.rename(tmp_path / "moved")).id == known
    assert enter(tmp_path / "b", fresh=True).id not in (known, other)


def test_a_trial_can_be_told_again(tmp_path: Path) -> None:
    run = enter(tmp_path)
    for t in (trial(1), trial(0), trial(1, seconds=0.3)):
        run.add_trial(t)
    assert run.trials() == [trial(0), trial(1, seconds=0.3)]
    assert len((run.path / "trials.jsonl").read_text().splitlines()) == 3


@given(st.integers(1, 400))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_torn_last_line_is_forgotten(tmp_path: Path, cut: int) -> None:
    run = enter(tmp_path, {"cut": cut})
    file = run.path / "trials.jsonl"
    file.unlink(missing_ok=True)
    run.add_trial(trial(0))
    run.add_trial(trial(1))
    with file.open("rb+") as handle:
        handle.truncate(file.stat().st_size - cut)
    assert run.trials() == [trial(0)]
    run.add_trial(trial(2))
    assert run.trials() == [trial(0), trial(2)]


def test_damage_elsewhere_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    run = enter(tmp_path)
    run.add_trial(trial(0))
    with (run.path / "trials.jsonl").open("a") as file:
        file.write("garbage\n")
    run.add_trial(trial(1))
    with raises(RunDirectoryError, "trials.jsonl:2") as caught:
        run.trials()
    assert "--fresh" in caught.value.remedy


@pytest.mark.parametrize("name", ["question.json", "environment.json", "graph.json.gz", "profile.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\x1f\x8bxxxx", b'{"a": 1}', b"[1]", b"null", b"[" * 100_000])
def test_damaged_files_are_errors(tmp_path: Path, name: str, content: bytes) -> None:
    run = enter(tmp_path)
    (run.path / name).write_bytes(content)
    with pytest.raises(RunDirectoryError) as caught:
        enter(tmp_path)
        RunDirectory.open(run.path)
        run.environment()
        run.graph()
        run.profile()
    assert caught.value.remedy and caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["lock", "trials.jsonl", "study.db"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_and_pipes_are_refused_and_their_targets_kept(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "folder").symlink_to(tmp_path / "real")  # folders may be links
    run = enter(tmp_path / "folder")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    if kind == "link":
        (run.path / name).symlink_to(victim)
    else:
        os.mkfifo(run.path / name)
    with raises(RunDirectoryError, name), enter(tmp_path / "folder").lock():
        run.add_trial(trial(0))
        assert run.storage
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["question.json", "trials.jsonl", "command.txt", "graph.json.gz", "profile.json"])
def test_a_pipe_in_the_place_of_a_file_is_an_error_at_once(tmp_path: Path, name: str) -> None:
    run = enter(tmp_path)
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    with raises(RunDirectoryError, name):
        run = RunDirectory.open(run.path)
        for read in (run.trials, run.command, run.graph, run.profile):
            read()


def test_a_directory_of_another_question_is_refused(tmp_path: Path) -> None:
    run = enter(tmp_path)
    other = QUESTION | {"budget": "40%", "extra": 1}
    (run.path / "question.json").write_text(json.dumps(other))
    with raises(RunDirectoryError, "budget", "extra"):
        enter(tmp_path)
    assert json.loads((run.path / "question.json").read_text()) == other


def test_a_directory_that_lost_its_question_is_refused(tmp_path: Path) -> None:
    run = enter(tmp_path)
    run.add_trial(trial(0))
    (run.path / "question.json").unlink()
    with raises(RunDirectoryError, "missing"):
        enter(tmp_path)
    with raises(RunDirectoryError):
        RunDirectory.open(run.path)
    with raises(RunDirectoryError):
        RunDirectory.open(tmp_path / "nothing")


def test_fresh_sets_the_old_run_aside(tmp_path: Path) -> None:
    old = enter(tmp_path)
    old.add_trial(trial(0))
    new = enter(tmp_path, fresh=True)
    assert new.path == old.path and new.trials() == []
    assert new.set_aside is not None and RunDirectory.open(new.set_aside).trials() == [trial(0)]


def test_two_searches_at_once_are_refused(tmp_path: Path) -> None:
    run = enter(tmp_path)
    with run.lock():
        with raises(RunDirectoryError, str(os.getpid())), enter(tmp_path).lock():
            pass
        with raises(RunDirectoryError):
            enter(tmp_path, fresh=True)
        assert RunDirectory.open(run.path).trials() == [], "reading is always possible"
    with enter(tmp_path).lock():
        pass


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    run = enter(tmp_path)
    code = (
        "import os, sys; from pathlib import Path; from autockpt.schema.run_directory import RunDirectory\n"
        "with RunDirectory(Path(sys.argv[1]), {}).lock(): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(run.path)]).returncode == 9
    with run.lock():
        pass


def test_an_unwritable_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError) as caught:
        enter(tmp_path / "file")
    assert "--out" in caught.value.remedy


def scored(number: int, peak: int, seconds: float, **more) -> Trial:
    return samples.trial(number, measured=Measurement(peak_bytes=peak, step_seconds=seconds), **more)


def numbers(trials) -> list[int]:
    return [t.number for t in trials]


def test_best_is_the_fastest_measured_plan_that_fits():
    trials = [
        scored(0, 90, 1.0, feasible=False),
        scored(1, 50, 3.0),
        scored(2, 60, 2.0),
        samples.trial(3, measured=None, state="predicted_over", feasible=False),
    ]
    assert numbers(ranking(trials)) == [2, 1]
    assert ranking(trials[:1]) == []


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=15))
def test_pareto_front_is_what_the_definition_says(points):
    trials = [scored(i, peak, float(seconds)) for i, (peak, seconds) in enumerate(points)]
    front = {points[t.number] for t in pareto_front(trials)}
    assert front == {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}


def test_a_run_in_python(tmp_path: Path) -> None:
    run = autockpt.open_run(make_run(tmp_path).path)
    trials, answer = run.trials(), run.plan()
    assert [t.number for t in trials] == [0, 1, 2, 3] and run.question["budget"] == "60%act"
    assert [t.number for t in run.pareto_front()] == [1, 2, 0] and [t.number for t in run.best(2)] == [2, 1]
    assert answer is not None and answer.hash == trials[2].plan_hash and run.path.name in repr(run)
    plan = run.plan_of(1)
    assert str(plan.choices["h.0-1"]) == "recompute" and plan.status == "measured"
    plan.save(tmp_path / "plan.yaml")
    assert autockpt.Plan.load(tmp_path / "plan.yaml").hash == trials[1].plan_hash
    with raises(RunDirectoryError):
        run.plan_of(9)
    with pytest.raises(RunDirectoryError):
        autockpt.open_run(tmp_path)
