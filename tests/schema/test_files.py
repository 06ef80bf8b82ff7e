from __future__ import annotations

import os
from pathlib import Path

from autockpt.errors import UsageError
from autockpt.schema.files import atomic_write, unwritable, write_file


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "f"
    atomic_write(path, "one")
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    path.chmod(0o640)
    atomic_write(path, b"two")
    assert path.read_text() == "two" and path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["f"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert unwritable(tmp_path / "plan.yaml") == unwritable(tmp_path / "file") == ""
    assert unwritable(tmp_path / "new" / "folder" / "plan.yaml") == ""
    assert unwritable(tmp_path) == "it is a directory, not a file"
    assert "is no directory" in unwritable(tmp_path / "file" / "plan.yaml")
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    real, link, dangling = tmp_path / "real", tmp_path / "link", tmp_path / "dangling"
    real.write_text("before")
    link.symlink_to(real)
    dangling.symlink_to(tmp_path / "new")
    assert unwritable(link) == unwritable(dangling) == ""
    for path in (link, dangling):
        write_file(path, "after", UsageError)
        assert path.is_symlink() and path.read_text() == "after"
    assert real.read_text() == (tmp_path / "new").read_text() == "after"
