import random

import numpy
import torch

from autockpt.devices.random_states import PythonStates, RandomStates, TorchStates, all_random_states_kept, seed
from tests.accelerator import KIND


def drawn() -> tuple[object, ...]:
    return random.random(), numpy.random.rand(), torch.rand(3).tolist()


def test_what_is_drawn_repeats_itself():
    before = RandomStates()
    first = drawn()
    before.restore()
    assert drawn() == first
    before.restore()
    with all_random_states_kept():
        drawn()
    assert drawn() == first


def test_every_device_of_a_kind_in_use_is_restored(accelerator):
    assert len(TorchStates().tensors) == 1  # nothing but the CPU is in use
    accelerator.opened = True
    with all_random_states_kept():
        seed(torch.device(KIND, 0), 7)
        first = torch.rand(2)
        assert [int(state[0]) for state in accelerator.states] == [7, 7]
        seed(torch.device("cpu"), 7)
        assert torch.equal(torch.rand(2), first)
    assert [int(state[0]) for state in accelerator.states] == [0, 1]
    assert len(TorchStates().tensors) == 3


def test_a_draw_by_python_or_numpy_is_noticed():
    for draw in (random.random, numpy.random.rand):
        before = PythonStates()
        assert not before.were_drawn_from()
        draw()
        assert before.were_drawn_from()
