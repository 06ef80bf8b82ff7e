"""What runs with room takes and returns what it would without, and no loop of its calls maps memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autockpt.callstack import with_room

LOOPS = """
import sys
from autockpt.callstack import with_room

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
