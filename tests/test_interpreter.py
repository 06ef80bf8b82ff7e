"""Calls with room return what they would without and map no memory; no signal is lost in a fork."""

import subprocess
import sys

import pytest

from autockpt.interpreter import with_room

LOOPS = """
import sys
from autockpt.interpreter import with_room

def called(): pass

def at(depth):
    if depth:
        return at(depth - 1)
    for _ in range(3000):
        called()

def loops():
    for depth in range(150):  # some of which end just where a chunk does
        at(depth)

{"nothing": lambda: None, "plain": loops, "room": lambda: with_room(loops)}[sys.argv[1]]()
"""


def test_the_answer_is_the_functions_and_so_is_the_error():
    assert with_room(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        with_room(lambda: 1 // 0)
    assert with_room(lambda: with_room(lambda: "inside")) == "inside"


def page_faults(how: str) -> int:
    program = f"import resource\n{LOOPS}\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)"
    return int(subprocess.run([sys.executable, "-c", program, how], capture_output=True, check=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux" or sys.implementation.name != "cpython", reason="CPython's own frames")
def test_no_depth_at_which_calls_map_memory():
    nothing, plain, roomy = map(page_faults, ("nothing", "plain", "room"))
    if plain < nothing + 1000:
        pytest.skip("this Python maps no memory at the ends of its chunks")
    assert roomy < nothing + 500


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")

PROGRAM = """
import os, signal, sys
from autockpt.interpreter import fork

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
