"""Errors on their way between processes, and what they hold on to."""

import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autockpt.errors as errors
from autockpt.devices import get_device
from autockpt.errors import AutockptError, DeviceOutOfMemory, MeasurementError
from autockpt.measuring.failures import device_lost, forget_frames, releasing_memory
from tests.errors import raises

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, AutockptError)]


@given(st.sampled_from(CLASSES), st.text(), st.one_of(st.none(), st.text()))
def test_every_error_survives_the_wire(cls, message, remedy):
    error = cls(message, remedy=remedy)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert (back.message, back.remedy, back.exit_code) == (error.message, error.remedy, error.exit_code)


def test_a_forgotten_error_holds_no_tensors():
    alive: list[weakref.ref] = []

    def inner() -> None:
        activation = torch.ones(3)
        alive.append(weakref.ref(activation))
        raise ValueError("first")

    def outer() -> None:
        kept = torch.ones(4)
        alive.append(weakref.ref(kept))
        try:
            inner()
        except ValueError as error:
            raise RuntimeError("second") from error

    caught: list[BaseException] = []
    try:
        outer()
    except RuntimeError as error:
        caught.append(error)
    assert all(ref() is not None for ref in alive)
    forget_frames(caught[0])
    gc.collect()
    assert all(ref() is None for ref in alive)
    assert str(caught[0]) == "second"


def test_only_the_devices_own_error_is_translated():
    with raises(DeviceOutOfMemory, "plan x"), releasing_memory(get_device("cpu"), "plan x"):
        raise MemoryError
    for error in (KeyError("k"), KeyboardInterrupt(), DeviceOutOfMemory("as it was")):
        with pytest.raises(type(error)) as passed, releasing_memory(get_device("cpu"), "plan x"):
            raise error
        assert passed.value is error


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("HIP error: an illegal memory access was encountered"), True),
        (RuntimeError("shapes differ"), False),
        (MeasurementError("the host would not pin (CUDA error 2)"), False),
    ],
)
def test_a_lost_device_is_known_by_its_runtimes_words(error, lost):
    assert device_lost(error) is lost
