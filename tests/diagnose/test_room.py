from __future__ import annotations

import pytest

from autockpt.diagnose.build import DiagnoseRequest, room_of
from autockpt.diagnose.oom_log import read_text
from autockpt.errors import UsageError
from autockpt.schema import parse_budget
from autockpt.schema.diagnosis import LogReading
from search_spaces.hardware import load_hardware
from tests.diagnose.logs import FORWARD, message

MIB, GIB = 2**20, 2**30


def log(**figures: str) -> LogReading:
    return read_text(FORWARD + message(**figures))


def test_the_device_is_the_one_of_the_message() -> None:
    room, hardware, notes = room_of(DiagnoseRequest(log=log()))
    assert hardware.memory_bytes == room.budget == round(23.52 * GIB)
    assert hardware.context_bytes == room.overhead == round(22.41 * GIB) - round(21.40 * GIB) - round(560.10 * MIB)
    assert room.others == 0 and "comes nearest" in notes[0]


def test_of_cards_that_are_equally_near_the_newest_is_taken_and_the_others_are_named() -> None:
    _, hardware, (note, *_) = room_of(DiagnoseRequest(log=log()))
    assert hardware.name == "rtx4090"
    assert "rtx4090, the newest of" in note and "as near: rtx3090" in note and "--hardware" in note


def test_what_others_hold_is_not_there_for_a_plan() -> None:
    room, _, _ = room_of(DiagnoseRequest(log=log(process="12.41 GiB", allocated="11.40 GiB")))
    assert room.others == round(23.52 * GIB) - round(1.10 * GIB) - round(12.41 * GIB)
    assert room.budget == round(23.52 * GIB) - room.others


def test_a_named_device_gives_the_seconds_and_the_message_the_bytes() -> None:
    room, hardware, notes = room_of(DiagnoseRequest(log=log(), hardware=load_hardware("h100")))
    assert hardware.name == "h100" and room.capacity == round(23.52 * GIB)
    assert hardware.matrix_flops == load_hardware("h100").matrix_flops and "memory the latter's" in notes[0]


def test_backends_choose_among_their_own_devices() -> None:
    _, hardware, _ = room_of(DiagnoseRequest(log=log(backend="HIP", capacity="191.00 GiB")))
    assert hardware.kind == "rocm"
    _, hardware, notes = room_of(DiagnoseRequest(log=log(backend="XPU")))
    assert hardware.kind == "cuda" and any("Intel" in note for note in notes)


def test_a_smaller_budget_counts_and_a_larger_one_does_not() -> None:
    assert room_of(DiagnoseRequest(log=log(), budget=parse_budget("20GiB")))[0].budget == 20 * GIB
    assert room_of(DiagnoseRequest(log=log(), budget=parse_budget("200GiB")))[0].budget == round(23.52 * GIB)


def test_without_figures_options_say_what_the_device_has() -> None:
    bare = read_text("RuntimeError: CUDA error: out of memory\n")
    rtx4090 = load_hardware("rtx4090")
    assert room_of(DiagnoseRequest(log=bare, hardware=rtx4090))[0].capacity == rtx4090.memory_bytes
    assert room_of(DiagnoseRequest(log=bare, budget=parse_budget("24GiB")))[0].budget == 24 * GIB
    with pytest.raises(UsageError, match="not known"):
        room_of(DiagnoseRequest(log=bare))


def test_nothing_is_left_beside_others() -> None:
    crowded = log(capacity="24.00 GiB", free="0 bytes", process="210.00 MiB", allocated="0 bytes", cached="0 bytes")
    with pytest.raises(UsageError, match="nothing is left"):
        room_of(DiagnoseRequest(log=crowded))


def test_devices_that_are_not_described_say_so() -> None:
    npu = read_text("RuntimeError: NPU out of memory. Tried to allocate 1.00 GiB (NPU 0; 60.96 GiB total capacity)")
    room, _, notes = room_of(DiagnoseRequest(log=npu))
    assert room.capacity == round(60.96 * GIB) and any("no NPU is described" in note for note in notes)


def test_a_process_of_which_nothing_is_known_leaves_what_it_holds_and_what_is_free() -> None:
    room, _, _ = room_of(DiagnoseRequest(log=log(process="0 bytes", allocated="10.00 GiB", cached="0 bytes")))
    assert room.budget == round(10.00 * GIB) + round(1.10 * GIB)
