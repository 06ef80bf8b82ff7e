"""The recipes of docs/cluster.md, as far as one machine can follow them."""

import itertools
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
def test_measured_searches_on_one_device_take_turns(program: Path, tmp_path: Path) -> None:
    """Both end with a plan, one is told for whom it waits, and no trial of one lies between trials of the other."""
    common = ["search", "--device", "cpu", "--model", "llama-tiny", "--batch-size", "2", "--budget", "60%act"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "AUTOCKPT_CACHE": str(tmp_path / "cache")}
    pipe: dict[str, Any] = {"env": environment, "stderr": subprocess.PIPE, "text": True}
    commands = [[program, *common, "--trials", "1", "--seq-len", length] for length in ("32", "64")]
    started = [subprocess.Popen(command, **pipe) for command in commands]
    said = [process.communicate(timeout=900)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert sum("waiting for cpu" in text for text in said) == 1
    spans = []
    for trials in tmp_path.glob("results/*/trials.jsonl"):
        begun = trials.with_name("environment.json").stat().st_mtime  # written before the first trial is
        spans.append((begun, trials.stat().st_mtime))
    (_, end), (begin, _) = sorted(spans)
    assert end < begin


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
