"""All that a call left behind in one file, for where only a few can be carried away; ``--earlier`` reads it."""

from __future__ import annotations

import os
import shutil
import zipfile
from contextlib import suppress
from pathlib import Path

from tests.gpu.packages import FOLDER

NAME = "measured.zip"
_LOG_BYTES, _MOST_BYTES = 200_000, 4_000_000
_LEFT_OUT = (FOLDER, "cache")  # made anew where they are needed


def pack(out: Path) -> Path:
    """Write the archive, whole or not at all: of logs their ends, of other files those that are small."""
    new = (out / NAME).with_suffix(".part")
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(out.rglob("*")):
            inside = path.relative_to(out)
            if not path.is_file() or inside.parts[0] in _LEFT_OUT or path.name == NAME or path.suffix == ".part":
                continue
            with suppress(FileNotFoundError):  # an item that runs may take away what it no longer needs
                if path.suffix == ".log":
                    archive.writestr(str(inside), path.read_bytes()[-_LOG_BYTES:])
                elif path.stat().st_size <= _MOST_BYTES:
                    archive.write(path, inside)
    os.replace(new, out / NAME)
    return out / NAME


def copy(packed: Path, target: Path) -> None:
    """The archive in another place, whole or not at all; into a folder under its own name."""
    if target.is_dir():
        target = target / NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_suffix(".part")
    shutil.copyfile(packed, new)
    os.replace(new, target)


def take_over(earlier: Path, out: Path) -> bool:
    """Copy what an earlier call left behind, a folder or its archive, unless it is here already. False: nothing there.

    A folder that holds the archive alone, as it may after a transfer, is as good as the archive.
    """
    if earlier.is_dir():
        for path in sorted(earlier.rglob("*")):
            inside = path.relative_to(earlier)
            if path.is_file() and inside.parts[0] not in _LEFT_OUT and path.name != NAME:
                _put(out / inside, path.read_bytes())
        earlier = earlier / NAME
        if not earlier.exists():
            return True
    if not zipfile.is_zipfile(earlier):
        return False
    with zipfile.ZipFile(earlier) as archive:
        for member in archive.infolist():
            target = (out / member.filename).resolve()
            if not member.is_dir() and target.is_relative_to(out):
                _put(target, archive.read(member))
    return True


def _put(target: Path, data: bytes) -> None:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
