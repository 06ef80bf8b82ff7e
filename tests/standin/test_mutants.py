from __future__ import annotations

import subprocess
import sys

import pytest

from tests.standin import build


@pytest.mark.campaign
def test_whatever_is_taken_out_of_the_stream_code_is_noticed(inside):
    done = subprocess.run(
        [sys.executable, "-m", "tests.standin.mutants"],
        env=build.environment(),
        cwd=build.ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
