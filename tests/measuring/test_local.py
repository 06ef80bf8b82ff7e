"""Measuring in the user's own process leaves no trace, whichever way it ends."""

import gc
import os
import signal

import pytest
import torch

from autockpt.errors import UsageError
from autockpt.interpreter import has_frozen_objects
from autockpt.measuring import LocalMeasurer, Measurer
from autockpt.measuring import snapshot as module
from autockpt.measuring.base import beats_counted
from tests.errors import raises
from tests.measuring.small_workloads import RECOMPUTE_ALL, Stack, Steps, bits, make_workload, same, train


@pytest.fixture
def workload():
    made = make_workload(Stack(norm=True))
    train(made)
    return made


@pytest.mark.slow
def test_measures_and_restores(workload):
    before = bits(workload)
    with LocalMeasurer(workload) as measurer:
        assert isinstance(measurer, Measurer)
        assert measurer.environment.device.kind == "cpu"
        plain = measurer.measure({}, steps=2)
        assert plain.steps == len(plain.times) == 2 and min(plain.times) <= plain.step_seconds <= max(plain.times)
        assert measurer.measure(RECOMPUTE_ALL, steps=1).peak_bytes < plain.peak_bytes
        passed = Steps()
        with beats_counted(measurer, passed):
            assert len(measurer.compare({"a": {}, "b": RECOMPUTE_ALL}, rounds=2)["b"]) == 2
        assert passed.count == 4
    assert same(before, bits(workload))


@pytest.mark.slow
def test_the_users_garbage_collector_is_as_before(workload):
    gc.unfreeze()
    with LocalMeasurer(workload) as measurer:
        measurer.measure({}, steps=1)
        assert has_frozen_objects()
    assert not has_frozen_objects()
    gc.freeze()
    count = gc.get_freeze_count()
    with LocalMeasurer(workload) as measurer:
        measurer.measure({}, steps=1)
    assert count <= gc.get_freeze_count() + 100  # some of them may have gone meanwhile
    assert gc.isenabled()


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()])
def test_restores_after_errors_in_the_middle_of_a_step(workload, error):
    before = bits(workload)

    def fail() -> None:
        raise error

    workload.model.before = fail
    before["attributes"] = bits(workload)["attributes"]
    with pytest.raises(type(error)), LocalMeasurer(workload) as measurer:
        measurer.measure(RECOMPUTE_ALL)
    assert same(before, bits(workload))


def test_ctrl_c_while_restoring_waits_until_it_is_done(workload, monkeypatch):
    before = bits(workload)
    measurer = LocalMeasurer(workload)
    measurer.measure({}, steps=1)
    release = measurer._device.release
    monkeypatch.setattr(measurer._device, "release", lambda: (os.kill(os.getpid(), signal.SIGINT), release()))
    with pytest.raises(KeyboardInterrupt):
        measurer.close()
    monkeypatch.undo()
    assert same(before, bits(workload))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_copying_restores(workload, monkeypatch):
    before = bits(workload)
    copied = module._host_copy
    monkeypatch.setattr(module, "_host_copy", lambda s: (os.kill(os.getpid(), signal.SIGINT), copied(s))[1])
    with pytest.raises(KeyboardInterrupt):
        LocalMeasurer(workload)
    gc.collect()
    assert same(before, bits(workload))


def test_forgotten_measurers_restore_when_they_go(workload):
    before = bits(workload)
    measurer = LocalMeasurer(workload)
    measurer.measure({}, steps=1)
    del measurer
    gc.collect()
    assert same(before, bits(workload))


def test_one_of_many_processes_is_refused_at_once(workload, monkeypatch):
    before = bits(workload)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with raises(UsageError) as caught:
        LocalMeasurer(workload)
    assert "autockpt.apply" in caught.value.remedy
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with raises(UsageError):
        LocalMeasurer(workload)
    assert same(before, bits(workload))
