from __future__ import annotations

import pytest

from autockpt.diagnose.advice import advice_of
from autockpt.diagnose.oom_log import read_text


@pytest.mark.parametrize(
    ("message", "tool"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
            "23.69 GiB of which 0.27 GiB is free. Process 9 has 20.23 GiB memory in use. Including non-PyTorch memory, "
            "this process has 3.19 GiB memory in use.",
            "nvidia-smi",
        ),
        (
            "RuntimeError: MPS backend out of memory (MPS allocated: 8.00 GB, other allocations: 1.00 GB, max allowed: "
            "9.07 GB). Tried to allocate 1.00 GB on private pool.",
            "the Activity Monitor",
        ),
    ],
)
def test_others_are_shown_by_what_there_is_on_that_machine(message: str, tool: str) -> None:
    others = [line for line in advice_of(read_text(message)) if line.startswith("Others hold")]
    assert len(others) == 1 and f"{tool} shows them" in others[0]
