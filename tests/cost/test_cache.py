"""Op times on disk are shared by searches that run at the same time, and may be killed at any moment."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autockpt.cost import op_times as cache
from autockpt.schema import OpTimes
from tests.samples import environment

ENVIRONMENT = environment()
WRITERS, KILLED, EACH = 4, 2, 20
OPS = {f"op {number}": 1e-3 * number for number in range(200)}
processes = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOCKPT_CACHE", str(tmp_path))
    return tmp_path / "op_times"


def times(**more: float) -> OpTimes:
    return OpTimes(environment=ENVIRONMENT, seconds=OPS, **more)


def lookup(workload: str, *ops: str) -> OpTimes | None:
    graph: Any = SimpleNamespace(timed={*(ops or OPS)})
    return cache.cached_op_times(ENVIRONMENT, [graph], workload)


def store_all(writer: int, start: object, stored: Connection) -> None:
    start.wait()
    for number in range(EACH):
        cache.store(times(optimizer_seconds=writer * EACH + number), f"workload {writer * EACH + number}")
        stored.send(f"workload {writer * EACH + number}")


def test_killed_writers_lose_nothing_that_was_stored(folder: Path) -> None:
    """Two of four, while they write."""
    start = processes.Barrier(WRITERS)
    pipes = [processes.Pipe(duplex=False) for _ in range(WRITERS)]
    writers = [processes.Process(target=store_all, args=(n, start, pipes[n][1])) for n in range(WRITERS)]
    for writer, (_, end) in zip(writers, pipes, strict=True):
        writer.start()
        end.close()
    stored, reading = set[str](), [begin for begin, _ in pipes]
    victims = {id(begin): writer.pid for begin, writer in zip(reading[:KILLED], writers, strict=False)}
    while reading:
        for begin in wait(reading):
            assert isinstance(begin, Connection)
            try:
                stored.add(begin.recv())
            except EOFError:
                reading.remove(begin)
                continue
            if len(stored) >= WRITERS and (pid := victims.pop(id(begin), None)):
                os.kill(pid, signal.SIGKILL)
    for writer in writers:
        writer.join()
    assert sum(writer.exitcode == -signal.SIGKILL for writer in writers) == KILLED
    assert len(stored) >= (WRITERS - KILLED) * EACH
    assert all(lookup(name) is not None for name in stored)
    assert all(OpTimes.model_validate_json(file.read_bytes()) for file in folder.glob("*.json"))


def test_ops_of_an_earlier_search_of_the_workload_are_kept() -> None:
    cache.store(times(), "workload")
    cache.store(OpTimes(environment=ENVIRONMENT, seconds={"op 1": 5.0, "new": 1.0}, host_seconds=3.0), "workload")
    known = lookup("workload", "new", *OPS)
    assert known is not None and known.seconds == OPS | {"op 1": 5.0, "new": 1.0} and known.host_seconds == 3.0
    assert lookup("workload", "unknown") is None and lookup("another workload") is None


@pytest.mark.parametrize("text", [b"", b"{", b'{"seconds": 3}', b"\xff"])
def test_a_corrupt_file_is_measured_and_written_again(folder: Path, text: bytes) -> None:
    cache.store(times(), "workload")
    (file,) = folder.glob("*.json")
    file.write_bytes(text)
    assert lookup("workload") is None
    cache.store(times(), "workload")
    assert lookup("workload") == times()
