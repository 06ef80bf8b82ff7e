import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from autockpt.errors import UsageError
from autockpt.schema.files import atomic_write, open_in_place, read_regular, unwritable, write_file


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "f"
    atomic_write(path, "one")
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    path.chmod(0o640)
    atomic_write(path, b"two")
    assert path.read_text() == "two" and path.stat().st_mode & 0o777 == 0o640
    atomic_write(path, os.fsdecode(b"caf\xe9"))  # a name that is no UTF-8
    assert path.read_text() == "caf?"
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


@pytest.mark.parametrize(("flags", "why"), [(0, "not yours"), (os.ST_RDONLY, "read-only")])
def test_why_a_folder_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int, why: str) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flags))
    assert str(tmp_path) in unwritable(tmp_path / "plan.yaml") and why in unwritable(tmp_path / "plan.yaml")


def test_only_regular_files_are_opened_and_links_only_to_read(tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    real.write_text("kept")
    link.symlink_to(real)
    os.mkfifo(pipe)
    assert read_regular(real) == read_regular(link) == b"kept"
    for path in (pipe, tmp_path):
        with pytest.raises(OSError, match=r"directory|pipe"):
            read_regular(path)
    for path in (link, pipe, tmp_path):
        with pytest.raises(OSError, match=r"directory|pipe|link"):
            open_in_place(path)
    (tmp_path / "folder").symlink_to(tmp_path)  # only the file's own place matters
    os.close(open_in_place(tmp_path / "folder" / "real"))
    assert real.read_text() == "kept"


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
