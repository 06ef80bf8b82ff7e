from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autockpt.diagnose import snapshot
from autockpt.diagnose.frames import ACTIVATIONS, BACKWARD, OPTIMIZER, UNRECORDED, WEIGHTS
from autockpt.diagnose.snapshot import read_snapshot, summarise_snapshot
from autockpt.errors import UsageError
from tests.diagnose.snapshots import ENGINE, LOADED, MIB, MLP, block, dumped, event, segment, training_oom


@pytest.fixture
def told(tmp_path: Path) -> Any:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(dumped(training_oom()))
    return read_snapshot(path)


def test_the_moment_of_the_failure_is_told_not_that_of_the_dump(told: Any) -> None:
    assert told.at_oom and told.tried == 500 * MIB and told.free == 120 * MIB
    assert told.reserved == 1700 * MIB and told.allocated == 1660 * MIB and told.inactive == 40 * MIB
    assert told.place.stage == "loss"
    assert any("freed since is counted again" in note for note in told.notes)


def test_purposes_by_stack(told: Any) -> None:
    assert told.purposes == {
        OPTIMIZER: 800 * MIB,
        WEIGHTS: 400 * MIB,
        ACTIVATIONS: 400 * MIB,
        BACKWARD: 60 * MIB,
    }


def test_blocks_of_one_place_are_one_group_named_by_its_telling_frame(told: Any) -> None:
    group = next(g for g in told.groups if g.purpose == ACTIVATIONS)
    assert (group.count, group.bytes) == (2, 400 * MIB)
    assert str(group.frame) == "modeling_llama.py:155 forward"
    assert [g.bytes for g in told.groups] == sorted((g.bytes for g in told.groups), reverse=True)


def test_without_an_oom_the_dump_is_told_with_its_free_blocks() -> None:
    data = training_oom()
    data["device_traces"] = [[]]
    told = summarise_snapshot(data)
    assert not told.at_oom and told.allocated == 1360 * MIB and told.inactive == 340 * MIB
    assert told.largest_free == 300 * MIB and told.requested == 1360 * MIB - 300
    assert any("no OOM event" in note for note in told.notes)


def test_segments_that_came_or_went_after_the_oom_are_taken_back() -> None:
    data = training_oom()
    data["device_traces"][0] += [event("segment_free", 0x1, 64 * MIB), event("segment_alloc", 0x2, 16 * MIB)]
    assert summarise_snapshot(data).reserved == (1700 + 64 - 16) * MIB


def test_the_device_that_failed_is_looked_at() -> None:
    data = training_oom()
    data["segments"].append(segment(0x10, [block(0x10, 9000 * MIB, LOADED)], device=1))
    data["device_traces"].append([])
    assert summarise_snapshot(data).device == 0
    with pytest.raises(UsageError, match="nothing of GPU 0"):
        summarise_snapshot({"segments": []})


def test_without_stacks_nothing_is_claimed() -> None:
    data = {"segments": [segment(0x10, [block(0x10, MIB), block(0x10 + MIB, MIB)])], "device_traces": [[]]}
    told = summarise_snapshot(data)
    assert told.purposes == {} and not told.with_stacks
    assert any("_record_memory_history" in note for note in told.notes)


def test_blocks_of_before_recording_are_not_taken_for_gradients() -> None:
    blocks = [block(0x100, 4 * MIB), block(0x100 + 4 * MIB, 2 * MIB), block(0x100 + 6 * MIB, MIB, MLP)]
    data = {
        "segments": [segment(0x100, blocks)],
        "device_traces": [[event("alloc", 0x100 + 4 * MIB, 2 * MIB)]],
    }
    told = summarise_snapshot(data)
    assert told.purposes == {UNRECORDED: 4 * MIB, BACKWARD: 2 * MIB, ACTIVATIONS: MIB}


def test_snapshots_of_older_versions() -> None:
    old = [
        {
            "device": 0,
            "address": 0x100,
            "total_size": 3 * MIB,
            "blocks": [
                {"size": 2 * MIB, "state": "active_allocated", "history": [{"real_size": MIB, "frames": MLP}]},
                {"size": MIB, "state": "inactive"},
            ],
        }
    ]
    told = summarise_snapshot(old)
    assert (told.allocated, told.requested, told.inactive) == (2 * MIB, MIB, MIB)
    assert told.purposes == {ACTIVATIONS: 2 * MIB}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"weights": 1}, "segments is missing"),
        ("text", "segments is a str"),
        ({"segments": [3]}, "a segment is 3"),
        ({"segments": [{"total_size": -1, "blocks": []}]}, "total_size is -1"),
        ({"segments": [{"total_size": 2, "blocks": [{"size": "much"}]}]}, "size is a str"),
        ({"segments": [], "device_traces": [[{"action": "oom", "size": None}]]}, "size is missing"),
        ({"segments": [], "device_traces": 5}, "device_traces is 5"),
    ],
)
def test_other_pickles_are_no_snapshots(data: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        summarise_snapshot(data)


def test_a_block_that_is_shared_without_end_is_counted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MOST_BLOCKS", 100_000)
    shared = {"total_size": 1, "blocks": [block(0x1, 1, ENGINE)] * 3_000}
    with pytest.raises(UsageError, match="more than 100,000"):
        summarise_snapshot({"segments": [shared] * 3_000})
