"""A page shared with a child process that says what the child was doing when it died."""

from __future__ import annotations

import mmap
import tempfile

_OP, _PLACE = 128, 384


class Note:
    """The op and the module that are running, written by the child before each op and readable after its death."""

    def __init__(self, fd: int | None = None) -> None:
        self._file = None
        if fd is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the note
            self._file.truncate(_OP + _PLACE)
            fd = self._file.fileno()
        self.fd = fd
        self._page = mmap.mmap(fd, _OP + _PLACE)

    def op(self, name: bytes) -> None:
        """Write the operator's name, padded by the caller to 128 bytes."""
        self._page[: len(name)] = name

    def place(self, path: str) -> None:
        """Write the module's path."""
        self._page[_OP:] = path.encode()[:_PLACE].ljust(_PLACE, b"\0")

    def read(self) -> str:
        """What the note says, in words."""
        op = self._page[:_OP].rstrip(b"\0").decode(errors="replace")
        place = self._page[_OP:].rstrip(b"\0").decode(errors="replace")
        if not op:
            return "before its first op"
        return f"at {op} in {place or 'the model itself'}"

    def close(self) -> None:
        self._page.close()
        if self._file is not None:
            self._file.close()
