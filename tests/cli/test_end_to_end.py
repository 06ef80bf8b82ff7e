"""The program as a person runs it, once in a process of its own. What it computes is tested where it is computed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Autockpt

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_trace_with_and_without_a_plan(autockpt: Autockpt, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text('autockpt: 1\nchoices:\n  "**.layers.*": recompute\n')
    job = ("trace", "--model", "llama-tiny", "--batch-size", "2", "--seq-len", "32", "--json")
    plain, planned = (autockpt(*job, *more) for more in ((), ("--plan", "plan.yaml")))
    assert plain.code == planned.code == 0, plain.err + planned.err
    before, after = plain.json["summary"], planned.json["summary"]
    assert after["peak"]["bytes"] < before["peak"]["bytes"] and after["saved_bytes"] < before["saved_bytes"]
    assert after["flops"] > before["flops"] and before["micro_batches"] == 1
    block = before["units"][0]
    assert block["count"] == 4 and block["boundary_bytes"] == 2 * 32 * 64 * 4
    assert abs(sum(u["share"] for u in before["units"] if not u["inner"]) - 1) < 1e-6


def test_an_unknown_model_is_one_screen(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from autockpt.cli import main; main()", "trace", "--model", "llama-tinny"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=900)
    assert done.returncode == 2 and "Traceback" not in done.stderr and not done.stdout
    assert "llama-tiny" in done.stderr and len(done.stderr.splitlines()) < 12
