"""The program as a person runs it, in a process of its own. What it computes is tested where it is computed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def autockpt(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "from autockpt.cli import main; main()"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=900)


def test_trace_with_and_without_a_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text('autockpt: 1\nchoices:\n  "**.layers.*": recompute\n')
    job = ("trace", "--model", "llama-tiny", "--batch-size", "2", "--seq-len", "32", "--json")
    plain, planned = (autockpt(*job, *more, cwd=tmp_path) for more in ((), ("--plan", "plan.yaml")))
    assert plain.returncode == planned.returncode == 0, plain.stderr + planned.stderr
    before, after = (json.loads(done.stdout)["summary"] for done in (plain, planned))
    assert after["peak"]["bytes"] < before["peak"]["bytes"] and after["saved_bytes"] < before["saved_bytes"]
    assert after["flops"] > before["flops"] and before["micro_batches"] == 1
    block = before["units"][0]
    assert block["count"] == 4 and block["boundary_bytes"] == 2 * 32 * 64 * 4
    assert abs(sum(u["share"] for u in before["units"] if not u["inner"]) - 1) < 1e-6


def test_an_unknown_model_is_one_screen(tmp_path: Path) -> None:
    done = autockpt("trace", "--model", "llama-tinny", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr and not done.stdout
    assert "llama-tiny" in done.stderr and len(done.stderr.splitlines()) < 12
