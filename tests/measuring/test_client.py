"""The worker process: measures, dies and comes back, and never outlives or hangs its parent."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autockpt.errors import DeviceOutOfMemory, MeasurementError, PlanError, TimeLimitReached, UsageError, WorkloadError
from autockpt.measuring import Measurer, WorkerMeasurer
from autockpt.measuring.base import beats_counted
from autockpt.process import last_lines
from autockpt.schema import RECOMPUTE, WorkloadSpec
from tests.children import Say, forked, is_gone
from tests.errors import raises
from tests.measuring.small_workloads import FACTORY, Steps

pytestmark = pytest.mark.slow

ALL = {f"layers.{i}": RECOMPUTE for i in range(3)}


def spec(function: str = "make") -> WorkloadSpec:
    return WorkloadSpec(model=f"my_factory:{function}")


@pytest.fixture
def start(factory: str) -> Iterator[Callable[..., WorkerMeasurer]]:
    """Starts measurers of the user's file and closes them."""
    made: list[WorkerMeasurer] = []

    def make(function: str = "make", **settings: object) -> WorkerMeasurer:
        made.append(WorkerMeasurer(spec(function), "cpu", **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for measurer in made:
        measurer.close()


def pid_of(measurer: WorkerMeasurer) -> int:
    return measurer.call("autockpt.probe:pid", {})["pid"]


def test_a_worker_measures_and_survives_failures(start, tmp_path, monkeypatch):
    """One worker for many questions, because each start imports torch again."""
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "12345")
    measurer = start()
    as_protocol: Measurer = measurer
    assert isinstance(as_protocol, Measurer)
    assert measurer.environment.device.kind == "cpu"
    assert measurer.environment.device.threads == 1
    assert measurer.environment.versions["torch"]
    # memory is kept between steps unless the user says otherwise, and what was set goes with every number
    settings = measurer.environment.versions["allocator settings"]
    assert "MALLOC_MMAP_THRESHOLD_=12345" in settings and "MALLOC_TRIM_THRESHOLD_=" in settings

    plain = measurer.measure({}, steps=3)
    assert len(plain.times) == 3
    assert measurer.measure(ALL, steps=1).peak_bytes < plain.peak_bytes
    passed = Steps()
    with beats_counted(measurer, passed):
        times = measurer.compare({"a": {}, "b": ALL}, rounds=2)
    assert [len(times[name]) for name in ("a", "b")] == [2, 2] and passed.count == 4, "each is seen while it runs"
    measurer.measure({}, steps=1)
    assert passed.count == 4, "and nothing afterwards"

    answer = measurer.call("autockpt.probe:pid", {"x": [1, "two"]})
    assert answer == {"pid": answer["pid"], "payload": {"x": [1, "two"]}, "kind": "cpu"}
    assert answer["pid"] != os.getpid()
    assert "factory imported" in last_lines(measurer.log, 100)

    with raises(PlanError, "layers.9"):
        measurer.measure({"layers.9": RECOMPUTE})
    with raises(MeasurementError, "KeyError"):
        measurer.call("autockpt.probe:wrong", {})
    with pytest.raises(MeasurementError):
        measurer.call("os:getcwd", {})
    measurer.call("autockpt.probe:interrupt", {})  # a Ctrl-C on the terminal is not the worker's
    assert pid_of(measurer) == answer["pid"]

    with raises(DeviceOutOfMemory):
        measurer.call("autockpt.probe:kill", {})
    second = pid_of(measurer)
    assert second != answer["pid"]
    assert measurer.measure({}, steps=1).peak_bytes == plain.peak_bytes

    with raises(MeasurementError, "exit code 3") as caught:
        measurer.call("autockpt.probe:leave", {})
    assert "about to leave" in caught.value.remedy


STAND_IN = """
import os, time
from multiprocessing.connection import Connection
from autockpt.schema import DeviceInfo, Environment

def main(descriptor):
    parent = Connection(descriptor)
    while True:
        verb, arguments = parent.recv()
        payload = arguments.get("payload", {})
        for _ in range(payload.get("beats", 0)):
            time.sleep(0.2)
            parent.send({"beat": "cycle"})
        time.sleep(payload.get("sleep", 0))
        if verb == "start":
            result = Environment(device=DeviceInfo(kind="cpu", name="made up", capacity_bytes=1), versions={})
        else:
            result = {"pid": os.getpid(), "length": len(payload.get("x", ""))}
        parent.send({"result": result})
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerMeasurer]:
    """A measurer whose worker only speaks the protocol, and so is there at once."""
    (tmp_path / "stand_in_worker.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autockpt.measuring.client._MODULE", "stand_in_worker")
    with WorkerMeasurer(WorkloadSpec(model="llama-tiny"), "cpu") as measurer:
        yield measurer


def test_one_of_many_processes_starts_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with raises(UsageError, "torchrun"):
        WorkerMeasurer(WorkloadSpec(model="llama-tiny"), "cpu")


def test_releasing_ends_the_worker_until_the_next_request(stand_in):
    first = pid_of(stand_in)
    stand_in.release()
    assert is_gone(first)
    assert stand_in.environment.device.name == "made up"  # known without a new worker
    assert pid_of(stand_in) != first


def test_silence_is_ended_and_signs_of_life_renew_patience(stand_in):
    first = pid_of(stand_in)
    stand_in.patience = 1.0
    assert stand_in.call("autockpt.probe:pid", {"beats": 6})["pid"] == first  # longer than a second in all
    begin = time.monotonic()
    with raises(MeasurementError):
        stand_in.call("autockpt.probe:pid", {"sleep": 600})
    assert time.monotonic() - begin < 20
    assert is_gone(first)
    stand_in.patience = 60.0
    assert pid_of(stand_in) != first


def test_signs_of_life_do_not_renew_a_time_limit(stand_in):
    first = pid_of(stand_in)
    begin = time.monotonic()
    with stand_in.within(1.0):
        assert stand_in.call("autockpt.probe:pid", {"beats": 1})["pid"] == first
        with raises(TimeLimitReached):
            stand_in.call("autockpt.probe:pid", {"beats": 600})
    assert time.monotonic() - begin < 20
    assert is_gone(first)
    assert stand_in.call("autockpt.probe:pid", {"beats": 6})["pid"] != first, "afterwards there is no limit"


def test_a_frozen_worker_does_not_hang_a_large_request(stand_in):
    assert stand_in.call("autockpt.probe:pid", {"x": "y" * 300_000})["length"] == 300_000
    os.kill(pid_of(stand_in), signal.SIGSTOP)
    stand_in.patience = 0.5
    with raises(MeasurementError):
        stand_in.call("autockpt.probe:pid", {"x": "y" * 300_000})


def test_ctrl_c_ends_the_worker(stand_in):
    first = pid_of(stand_in)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        stand_in.call("autockpt.probe:pid", {"sleep": 600})
    assert is_gone(first)
    assert pid_of(stand_in) != first


def test_the_worker_ends_with_its_parent(factory):
    """Even a parent that is killed takes it along, in the middle of a request."""

    def work(say: Say) -> None:
        measurer = WorkerMeasurer(spec(), "cpu")
        say(pid_of(measurer))
        measurer.call("autockpt.probe:sleep", {"seconds": 600})

    parent = forked(work)
    worker = parent.receive()
    time.sleep(0.2)
    os.kill(parent.pid, signal.SIGKILL)
    assert is_gone(worker)


def test_the_users_mistakes_arrive_with_their_place(start):
    with raises(WorkloadError, "width 3 is odd") as caught:
        start("broken").measure({})
    line = FACTORY.splitlines().index('    raise ValueError(f"width {width} is odd")') + 1
    assert f"my_factory.py:{line}" in caught.value.message
    with raises(WorkloadError, "my_factory.py", "IndexError"):
        start("failing_step").measure({})


def test_running_out_of_memory_keeps_the_worker(start):
    measurer = start("too_large")
    pid = pid_of(measurer)
    with pytest.raises(DeviceOutOfMemory):
        measurer.measure(ALL)
    assert pid_of(measurer) == pid
