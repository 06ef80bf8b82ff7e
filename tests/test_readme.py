"""The README's commands are what is tested, and its first job is one that a budget binds."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def commands() -> list[str]:
    """The one-line bash blocks of the README, in order."""
    return re.findall(r"```bash\n(.*)\n```", (ROOT / "README.md").read_text())


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    steps = [step.strip() for step in commands()[1].split("&&")]
    assert steps[0] == "python3 -m venv .venv"
    for step in steps[2:]:
        assert step in script


def test_the_first_job_has_a_feasible_and_binding_budget(tmp_path: Path) -> None:
    arguments = shlex.split(commands()[0].split("&&")[-1])
    assert arguments[:2] == ["autockpt", "search"]
    line = [sys.executable, "-m", "autockpt", *arguments[1:], "--device", "cpu", "--dry-run", "--json"]
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, capture_output=True, text=True, check=True, cwd=tmp_path, env=here, timeout=900)
    answer = json.loads(done.stdout)
    ours = answer["rows"][-1]["predicted"]["peak_bytes"]
    assert answer["binding"]
    assert answer["smallest_peak"] <= ours <= answer["budget"]["bytes"]
