from __future__ import annotations

import os
from pathlib import Path

import pytest

from autockpt.schema.files import atomic_write, reason, set_aside, unwritable


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


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert unwritable(tmp_path / "plan.yaml") == unwritable(tmp_path / "file") == ""
    assert unwritable(tmp_path / "new" / "folder" / "plan.yaml") == ""
    assert unwritable(tmp_path) == "it is a directory"
    assert "is no directory" in unwritable(tmp_path / "file" / "plan.yaml")
    assert sorted(os.listdir(tmp_path)) == ["file"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_of_others_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "not yours" in unwritable(tmp_path / "plan.yaml")
    tmp_path.chmod(0o700)
