"""The program as a person runs it, once in a process of its own. What it computes is tested where it is computed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autockpt.schema import Graph
from tests.cli.conftest import Autockpt

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_the_ops_of_a_step_with_and_without_a_plan(autockpt: Autockpt, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text('autockpt: 1\nchoices:\n  "**.layers.*": recompute\n')
    job = ("--model", "llama-tiny", "--batch-size", "2", "--seq-len", "32", "--ops", "--json")
    plain, planned = (autockpt("explain", *plan, *job) for plan in ((), ("plan.yaml",)))
    assert plain.code == planned.code == 0, plain.err + planned.err
    before, after = (Graph.model_validate(run.json) for run in (plain, planned))
    assert after.peak_bytes < before.peak_bytes and after.flops > before.flops
    assert {op.phase for op in after.ops} - {op.phase for op in before.ops} == {"recompute"}
    lines = autockpt("explain", *job[:-1]).out.splitlines()
    assert len(lines) == 1 + len(before.ops) and lines[0].startswith("op\tphase\ttarget")


def test_an_unknown_model_is_one_screen(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from autockpt.cli import main; main()", "explain", "--model", "llama-tinny"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=900)
    assert done.returncode == 2 and "Traceback" not in done.stderr and not done.stdout
    assert "llama-tiny" in done.stderr and len(done.stderr.splitlines()) < 12
