"""Child processes: what is said of one that ends, and that none is left behind."""

import os
import signal
import site
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import autockpt
from autockpt.process import Child, ChildDied, child_environment, in_a_fork, last_lines
from tests.children import is_gone

ECHO = """
import subprocess, sys
from multiprocessing.connection import Connection

def main(descriptor, code):
    parent = Connection(descriptor)
    print("about to begin", flush=True)
    while True:
        asked = parent.recv()
        if asked == "leave":
            sys.exit(code)
        if asked == "child":
            asked = subprocess.Popen(["sleep", "600"]).pid
        parent.send(asked)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    (tmp_path / "echo_child.py").write_text(ECHO)
    monkeypatch.chdir(tmp_path)
    with tempfile.TemporaryFile() as log:
        made = Child.spawn("echo_child", 3, log=log, environment=child_environment())
        made.log = log  # type: ignore[attr-defined]
        yield made
        made.close()


def test_messages_come_back_and_what_it_prints_is_kept(child) -> None:
    message = {"bytes": b"x" * 300_000, "path": Path("a")}
    child.send(message)
    assert child.receive(30.0) == message and child.alive
    assert last_lines(child.log) == "  about to begin"


@pytest.mark.parametrize("code", [3, -signal.SIGKILL])
def test_how_a_child_ended_is_reported(child, code: int) -> None:
    child.send("x")
    assert child.receive(30.0) == "x"
    child.send("leave") if code > 0 else os.kill(child.pid, -code)
    with pytest.raises(ChildDied) as caught:
        child.receive()
    assert caught.value.code == code and not child.alive


def test_closing_ends_all_that_it_started(child) -> None:
    child.send("child")
    other = child.receive(30.0)
    child.close()
    child.close()
    assert is_gone(child.pid) and is_gone(other)


def test_a_fork_answers_and_leaves_this_process_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    noted: list[int] = []
    assert in_a_fork(lambda: [noted.append(1), len(noted)]) == [None, 1]
    assert noted == []
    assert in_a_fork(lambda: os._exit(3)) is None and in_a_fork(lambda: 1 / 0) is None
    assert capfd.readouterr() == ("", "")


def test_a_child_is_told_of_this_process_s_own_modules_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vendored = os.path.join(site.getsitepackages()[0], "setuptools", "_vendor")
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), vendored, *sys.path])
    told = child_environment({"A": "1"})["PYTHONPATH"].split(os.pathsep)
    assert {os.getcwd(), str(tmp_path), str(Path(autockpt.__file__).parents[1])} <= set(told)
    assert not any("site-packages" in path or path == os.path.dirname(os.__file__) for path in told)
