"""The recipes of docs/cluster.md, as far as one machine can follow them."""

import itertools
import json
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from autockpt.cli.app import build
from autockpt.devices import get_device
from autockpt.measuring import device_lock
from tests.children import Say, forked

PAGE = (Path(__file__).parent.parent / "docs" / "cluster.md").read_text()
SMALL = {
    '["llama-1b", "gpt2"]': '["llama-tiny", "gpt2-tiny"]',
    "[512, 1024]": "[32, 64]",
    '"60%"': '"60%act"',
    "batch_size=4": "batch_size=2, trials=1",
}


def block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)
    return text


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ``autockpt`` on the path; what stands in it is a Python program."""
    path = tmp_path / "bin" / "autockpt"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\nfrom autockpt.cli import main\nmain()\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (3, 0), (4, 1)])
def test_an_array_asks_eight_questions_and_takes_no_fit_for_an_answer(program: Path, code: int, ends: int) -> None:
    program.write_text(f"#!{sys.executable}\nimport sys\nprint(*sys.argv[1:])\nsys.exit({code})\n")
    asked = set()
    for task in range(8):
        script = subprocess.run(
            ["bash", "-c", block("bash")],
            env=os.environ | {"SLURM_ARRAY_TASK_ID": str(task)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert bool(script.returncode) == bool(ends), script.stderr
        asked.add(script.stdout)
    assert len(asked) == 8 and all("--out /shared/results" in words for words in asked)


@pytest.mark.slow
def test_a_measured_search_waits_for_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told for whom, and measures nothing before."""
    monkeypatch.setenv("AUTOCKPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def measure(say: Say) -> None:
        with device_lock.device_lock(get_device("cpu"), print):
            say("begun")
            time.sleep(600)

    other, measured = forked(measure), list[Path]()
    assert other.receive(60) == "begun"

    def poll(seconds: float) -> None:
        measured.extend(tmp_path.glob("results/*/trials.jsonl"))
        other.close()

    monkeypatch.setattr(device_lock, "time", SimpleNamespace(sleep=poll))
    job = ("--device", "cpu", "--model", "llama-tiny", "-b", "1", "-s", "16", "--choices", "save,recompute")
    done = CliRunner().invoke(build(), ["search", *job, "--budget", "60%act", "--trials", "1"])
    assert done.exit_code == 0 and done.stderr.count("waiting for cpu") == 1, done.stderr
    assert not measured and [*tmp_path.glob("results/*/trials.jsonl")]


@pytest.mark.slow
def test_ray_tasks_fill_one_folder(program: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    source = block("python")
    for whole, small in SMALL.items():
        assert whole in source
        source = source.replace(whole, small)
    more = "ray.init(num_cpus=2, include_dashboard=False, configure_logging=False)\n"
    done = subprocess.run(
        [sys.executable, "-c", source.replace("@ray.remote", f"{more}\n@ray.remote")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    listed = subprocess.run([program, "history", "--json"], capture_output=True, text=True, check=True, timeout=120)
    runs = json.loads(listed.stdout)
    cards = ["NVIDIA GeForce RTX 4090", "NVIDIA H100"]
    expected = itertools.product(["llama-tiny", "gpt2-tiny"], cards, ["2×32", "2×64"])
    assert len(runs) == 8
    for model, on, job in expected:
        (run,) = [r for r in runs if r["model"] == model and r["on"].startswith(on) and r["job"] == job]
        assert run["answer"]["plan_hash"] and run["answer"]["predicted"]["peak_bytes"]
