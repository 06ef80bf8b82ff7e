from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from autockpt.errors import UsageError
from autockpt.schema.files import (
    ScratchFolder,
    atomic_write,
    open_regular,
    read_regular,
    reason,
    set_aside,
    unwritable,
    write_file,
)

ROOT = Path(__file__).parents[2]


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
    assert unwritable(tmp_path) == "it is a directory, not a file"
    assert "is no directory" in unwritable(tmp_path / "file" / "plan.yaml")
    assert sorted(os.listdir(tmp_path)) == ["file"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_of_others_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "not yours" in unwritable(tmp_path / "plan.yaml")
    tmp_path.chmod(0o700)


def test_only_regular_files_are_opened_and_links_only_where_they_are_asked_for(tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    real.write_text("kept")
    link.symlink_to(real)
    os.mkfifo(pipe)
    assert read_regular(real) == b"kept" and read_regular(link, links=True) == b"kept"
    for path, links, word in ((link, False, "symbolic link"), (pipe, True, "a pipe"), (tmp_path, True, "a directory")):
        for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
            with pytest.raises(OSError, match=r"directory|pipe|link") as caught:
                open_regular(path, flags, links=links)
            assert word in reason(caught.value)
    (tmp_path / "folder").symlink_to(tmp_path)  # only the file's own place matters
    assert read_regular(tmp_path / "folder" / "real") == b"kept"


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
    with pytest.raises(UsageError, match="symbolic link"):
        write_file(link, "theirs", UsageError, links=False)
    assert real.read_text() == "after"


def test_a_pipe_takes_the_text_and_stays_one(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        assert unwritable(path) == ""
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        write_file(path, "text", UsageError)
        assert os.read(reader, 100) == b"text"
        os.close(reader)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"] and pipe.is_fifo()


def test_what_is_neither_file_nor_stream_is_refused(tmp_path: Path) -> None:
    path, loop = tmp_path / "s", tmp_path / "loop"
    loop.symlink_to(loop)
    with contextlib.chdir(tmp_path), socket.socket(socket.AF_UNIX) as made:  # the name of a socket must be short
        made.bind("s")
        for wrong, word in ((path, "socket, not a file"), (loop, "links"), (tmp_path, "a directory")):
            assert word in unwritable(wrong)
            with pytest.raises(UsageError, match=f"{word}[^\n]*\nGive a path") as caught:
                write_file(wrong, "text", UsageError)
            assert str(wrong) in caught.value.message
    assert sorted(os.listdir(tmp_path)) == ["loop", "s"]


@pytest.mark.slow
def test_what_is_printed_stays_where_a_file_is_written_to_the_output(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from autockpt.schema.files import write_file\n"
        "print('before'); write_file(Path('stream'), 'text\\n', Exception); print('after')"
    )
    (tmp_path / "stream").symlink_to("/proc/self/fd/1")
    with open(tmp_path / "printed", "wb") as printed:
        subprocess.run(
            [sys.executable, "-c", code], stdout=printed, timeout=900, cwd=tmp_path, check=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert (tmp_path / "printed").read_text() == "before\ntext\nafter\n"
    assert sorted(os.listdir(tmp_path)) == ["printed", "stream"]


@pytest.mark.slow
def test_what_a_process_was_given_to_read_is_read(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from autockpt.schema.files import read_regular\n"
        "print(read_regular(Path('/dev/stdin'), links=True))"
    )
    told = subprocess.run([sys.executable, "-c", code], input=b"piped", capture_output=True, timeout=900, cwd=ROOT)
    assert told.stdout == b"b'piped'\n", told.stderr


def test_folders_of_processes_that_were_killed_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine, kept = tmp_path / "autockpt-notes", tmp_path / "autockpt-examples"
    for folder in (mine, kept):
        folder.mkdir()
        (folder / "worker.log").write_text("not theirs")
    (kept / "more").write_text("")
    (tmp_path / "autockpt-abcd_012").symlink_to(mine)
    code = (
        "import os; from autockpt.schema.files import ScratchFolder as S; from pathlib import Path\n"
        "s = S(); Path(s.name, 'worker.log').write_text('x'); print(s.name, flush=True)\n"
        "input(); os.kill(os.getpid(), 9)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert other.stdin is not None and other.stdout is not None
    theirs = Path(other.stdout.readline().strip())
    with ScratchFolder() as name:
        assert theirs.exists() and Path(name).parent == tmp_path
    other.communicate("\n", timeout=900)
    assert theirs.exists()
    with ScratchFolder():
        assert not theirs.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["autockpt-abcd_012", "autockpt-examples", "autockpt-notes"]
