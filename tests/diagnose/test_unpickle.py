from __future__ import annotations

import collections
import contextlib
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.diagnose.unpickle import Refused, load_data, loads
from autockpt.errors import UsageError
from tests.diagnose.snapshots import training_oom

SCALARS = st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.floats(allow_nan=False) | st.text()
DATA = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text() | st.integers(-(2**40), 2**40), inner, max_size=5)
        | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=25,
)


@pytest.mark.slow
@given(DATA, st.integers(0, pickle.HIGHEST_PROTOCOL))
@settings(max_examples=200, deadline=None)
def test_plain_data_comes_back_as_it_was(data: Any, protocol: int) -> None:
    back = loads(pickle.dumps(data, protocol=protocol))
    assert back == data and type(back) is type(data)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_snapshot_with_shared_frames_comes_back(protocol: int) -> None:
    data = training_oom()
    assert loads(pickle.dumps(data, protocol=protocol)) == data


class Creates:
    """A pickle of this makes a file when it is loaded by Python."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_run_code_is_refused_by_name_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    made = tmp_path / "made"
    data = pickle.dumps({"segments": [Creates(made)], "device_traces": []}, protocol=protocol)
    with pytest.raises(Refused, match=r"'(io|_io|__builtin__)\.open'"):
        loads(data)
    assert not made.exists()
    pickle.loads(data)  # it is as hostile as it is meant to be
    assert made.exists()


@pytest.mark.parametrize(
    "value", [collections.OrderedDict(a=1), {1, 2}, b"raw", bytearray(b"x"), 1j, frozenset(), Path, range(3)]
)
def test_what_is_no_plain_data_is_refused(value: object) -> None:
    with pytest.raises(Refused, match="refused"):
        loads(pickle.dumps([value]))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"cposix\nsystem\n(S'true'\ntR.", "posix.system"),
        (b"(S'true'\niposix\nsystem\n.", "opcode"),
        (b"\x80\x02]r\xff\xff\xff\xff.", None),  # sizes the memo of Python's own unpickler at 32 GiB
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.", "cut off"),
        (b"\x80\x02" + b"(" * 10_000 + b".", "nests"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f.", "cut off"),
        (b"\x80\x02\x8b\x20\0\0\0" + b"\x7f" * 32 + b".", "integer"),
        (b"\x80\x02}N\x85\x85Ns.", "as a key"),
        (b"\x80\x02](\x85Nd.", "broken|as a key"),
        (b"\x80\x02}}b.", "BUILD"),
        (b"\x80\x02N2.", "DUP"),
        (b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"Ns.", "as a key"),
        (b"\x80\x02P1\n.", "PERSID"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02N(e.", "broken"),
        (b"\x80\x02]]a.", None),
        (b"\x80\x02(.", "broken"),
        (b"\x80\x02h\x05.", "broken"),
        (b"", "cut off"),
        (b"\x80", "cut off"),
        (b"PK\x03\x04", "refused|broken|cut off"),
        (b"\xff\xfe\x00", "refused"),
    ],
)
def test_hostile_and_broken_bytes(data: bytes, said: str | None) -> None:
    if said is None:
        assert isinstance(loads(data), list)
    else:
        with pytest.raises(Refused, match=said):
            loads(data)


def test_every_truncation_is_a_clear_error() -> None:
    data = pickle.dumps(training_oom())
    for end in range(0, len(data) - 1, 5):
        with pytest.raises(Refused, match="cut off"):
            loads(data[:end])


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_no_bytes_break_the_reader(data: bytes) -> None:
    with contextlib.suppress(Refused):
        loads(b"\x80\x04" + data)


@pytest.mark.parametrize("piece", [b"]", b")", b"}", b"N\x94", b"(l"])
def test_memory_is_bounded_by_a_count(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autockpt.diagnose.unpickle.MOST_OBJECTS", 20)
    with pytest.raises(Refused, match="more than 20"):
        loads(b"\x80\x04" + piece * 100 + b".")


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": []}))
    assert load_data(path) == {"segments": []}
    monkeypatch.setattr("autockpt.diagnose.unpickle.LARGEST_FILE", 3)
    with pytest.raises(UsageError, match="more than"):
        load_data(path)
    with pytest.raises(UsageError, match="cannot be read"):
        load_data(tmp_path / "absent")
