from __future__ import annotations

import os
from pathlib import Path

import pytest

from autockpt.schema.files import atomic_write, reason, set_aside


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "f"
    atomic_write(path, "one")
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    path.chmod(0o640)
    atomic_write(path, b"two")
    assert path.read_text() == "two" and path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["f"]


def test_nothing_is_left_behind_where_writing_fails(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(OSError):
        atomic_write(target, "x")
    assert os.listdir(tmp_path) == ["folder"]


def test_files_set_aside_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for text in "ab":
        path.write_text(text)
        set_aside(path)
    assert (tmp_path / "f.1").read_text() == "a" and (tmp_path / "f.2").read_text() == "b" and not path.exists()


def test_reasons_are_for_people(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        atomic_write(tmp_path / "missing" / "f", "x")
    assert reason(caught.value) == "no such file or directory"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
