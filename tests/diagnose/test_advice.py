from __future__ import annotations

import pytest

from autockpt.diagnose.advice import advice_of, verdict_of
from autockpt.diagnose.oom_log import read_text
from tests.diagnose.logs import message
from tests.diagnose.origins import LOGS


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


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        # 3.77 GiB unused and 2.10 free for 3.42: one block of them would have done
        (message("3.42 GiB", "79.11 GiB", "2.10 GiB", "76.99 GiB", "71.31 GiB", "3.77 GiB"), "PYTORCH_ALLOC_CONF"),
        (message("8.00 GiB", "79.11 GiB", "2.10 GiB", "76.99 GiB", "71.31 GiB", "3.77 GiB"), ""),  # it would not
        (message("20.00 MiB", "79.11 GiB", "9.00 MiB", "79.10 GiB", "78.00 GiB", "90.00 MiB"), ""),  # as in any run
        (message("1.00 GiB", "24.00 GiB", "0.50 GiB", "23.00 GiB", "18.00 GiB", "4.00 GiB", backend="HIP"), "_HIP_"),
        (
            "RuntimeError: NPU out of memory. Tried to allocate 5.03 GiB (NPU 3; 60.96 GiB total capacity; 49.47 GiB "
            "already allocated; 49.47 GiB current active; 1.32 GiB free; 57.55 GiB reserved in total by PyTorch)",
            "PYTORCH_NPU_ALLOC_CONF",
        ),
        (LOGS["cudaMallocAsync"][0], ""),  # its segments are the driver's
        (LOGS["Windows, more than the card has"][0], ""),
        ("UserWarning: expandable_segments not supported on this platform\n" + message(cached="9.00 GiB"), ""),
    ],
)
def test_segments_are_to_expand_where_that_would_help(text: str, setting: str) -> None:
    advice = [line for line in advice_of(read_text(text)) if "expandable_segments" in line]
    assert len(advice) == bool(setting) and all(setting in line for line in advice)


def test_the_rank_that_failed_is_one_of_the_world() -> None:
    assert "GPU 1 (rank 5 of 8) ran out" in verdict_of(read_text(LOGS["torchrun's summary"][0]))
    assert verdict_of(read_text(LOGS["gaudi, lazy mode"][0])).startswith("The device (rank 5) ran out")
    assert verdict_of(read_text(LOGS["npu behind Ray"][0])).startswith("NPU 3 ran out")
