"""Signals: none is lost, wherever it comes."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")

PROGRAM = """
import os, signal, sys
from autockpt.signals import fork

def handler(number, frame):
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, handler)
signal.signal(signal.SIGTERM, handler)
os.register_at_fork(**{sys.argv[1]: lambda: os.kill(os.getpid(), int(sys.argv[2]))})
try:
    pid = fork()
except KeyboardInterrupt:
    print("interrupted")
else:
    if not pid:
        os._exit(0)
    print("not noticed", os.waitpid(pid, 0)[1])
"""


@pytest.mark.parametrize("number", [2, 15])
@pytest.mark.parametrize(
    ("hook", "said"),
    [("before", "interrupted"), ("after_in_parent", "interrupted"), ("after_in_child", "not noticed 0")],
)
def test_a_signal_while_forking_is_handled_afterwards(hook: str, said: str, number: int) -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM, hook, str(number)], capture_output=True, text=True)
    assert (run.stdout.strip(), run.stderr) == (said, "")
