"""Which device the contract suite runs on: the CPU, or what ``AUTOCKPT_TEST_DEVICE`` names.

    AUTOCKPT_TEST_DEVICE=cuda python -m pytest tests/policies/test_contract.py tests/policies/test_architectures.py

On a GPU kernels must repeat themselves bit by bit, so deterministic ones are asked for (see ``tests/conftest.py``).
``tests/standin`` runs them on an accelerator that needs no hardware.
"""

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

DEVICE = torch.device(os.environ.get("AUTOCKPT_TEST_DEVICE", "cpu"))
ON_CUDA = DEVICE.type == "cuda"
ON_ACCELERATOR = DEVICE.type != "cpu"


def here(value: Any) -> Any:
    """Tensors, also inside of dicts and lists, on the device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(DEVICE), value)


def random_state_kept() -> AbstractContextManager[None]:
    """What is drawn inside leaves the states of the CPU and the device as they were.

    In torch 2.11 ``fork_rng`` keeps those of CUDA unless told which.
    """
    return torch.random.fork_rng(device_type=DEVICE.type if ON_ACCELERATOR else "cuda")


def random_state() -> Tensor:
    """The states that steps on the device draw from, the CPU's among them."""
    states = [torch.get_rng_state()]
    if ON_ACCELERATOR:
        states.append(torch.get_device_module(DEVICE).get_rng_state(DEVICE))
    return torch.cat(states)
