"""Pickles as data: containers, text, numbers, booleans and None, and nothing that could run code.

Python's own unpickler in Python, with only the opcodes that such data consists of (see pickletools for what each does).
The one in C would not do, with globals refused either: a few bytes make it claim all memory there is (``LONG_BINPUT``
sizes its memo by an index from the file) or exhaust the stack (hashing a tuple that holds a tuple that …).
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autockpt.errors import UsageError

LARGEST_FILE = 1 << 29
DEEPEST = 64  # containers open at once
MOST_OBJECTS = 8_000_000  # containers; and as many entries again of the memo
LONGEST_INT = 16  # bytes
_REMEDY = (
    "Only what torch.cuda.memory._dump_snapshot writes is read; nothing of the file was executed. If you trust where "
    "it is from, write the snapshot again with torch.cuda.memory._dump_snapshot(FILE)."
)
_NAMES = {ord(op.code): op.name for op in pickletools.opcodes}
_CONTAINERS = {"EMPTY_LIST", "LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "DICT"}
_INTEGERS = {"INT", "LONG", "LONG1", "LONG4"}
_KEYED = {"DICT", "SETITEM", "SETITEMS"}
_REMEMBERING = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
# GLOBAL and STACK_GLOBAL are among them only so that what they name can be said
_PLAIN = {"PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1"} | {
    "BININT2", "FLOAT", "BINFLOAT", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "APPEND", "APPENDS",
    "GET", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", *_CONTAINERS, *_INTEGERS, *_KEYED, *_REMEMBERING,
}  # fmt: skip


class Refused(UsageError):
    """The pickle holds what no plain data does, or is broken. Exit code 2."""


def load_data(path: Path) -> Any:
    """The data of a pickle file. Raises Refused; UsageError for a file that cannot be read or is too large."""
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise UsageError(
                f"{path} has {size >> 20} MiB, more than the {LARGEST_FILE >> 20} MiB that are read",
                remedy="Record fewer events: torch.cuda.memory._record_memory_history(max_entries=100000).",
            )
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", remedy="Name the snapshot.") from None
    return loads(data, str(path))


def loads(data: bytes, name: str = "the pickle") -> Any:
    """The same for bytes. Dicts have str or int keys only. Raises Refused."""
    source = _Source(data)
    try:
        return _Reader(source).load()
    except EOFError:
        raise Refused(
            f"{name} is cut off: it ends after {len(data):,} bytes, in the middle",
            remedy="The run may have died while it wrote it, or a copy is incomplete: write or copy it again.",
        ) from None
    except _Forbidden as error:
        raise Refused(f"{name} is refused: {error} before byte {source.tell():,}", remedy=_REMEDY) from None
    except (pickle.UnpicklingError, LookupError, ValueError, TypeError, AttributeError, OverflowError, struct.error):
        where = f"before byte {source.tell():,} of {len(data):,}"
        raise Refused(f"{name} is no pickle of plain data: broken {where}", remedy=_REMEDY) from None


class _Forbidden(Exception):
    """An opcode or a shape that plain data does not have, in words."""


class _Source(io.BytesIO):
    """Bytes of which too few are an error."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if size is not None and len(data) < size:
            raise EOFError
        return data

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        if not line.endswith(b"\n"):
            raise EOFError
        return line


class _Opcodes(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise _Forbidden(f"opcode {_NAMES.get(code, hex(code))}, which plain data does not have,")


class _Reader(pickle._Unpickler):
    """The standard unpickler, held to plain data."""

    stack: list[Any]
    metastack: list[list[Any]]
    memo: dict[int, Any]
    containers = 0

    def find_class(self, module: str, name: str, /) -> Any:
        raise _Forbidden(f"it names the Python object {f'{module}.{name}'[:160]!r}")

    def persistent_load(self, pid: Any, /) -> Any:
        raise _Forbidden("it refers to an object outside")

    def check(self, opcode: str) -> None:
        """Refuse what would take memory or stack without end."""
        if opcode == "MARK" and len(self.metastack) >= DEEPEST:
            raise _Forbidden(f"it nests more than {DEEPEST} containers")
        if opcode in _CONTAINERS:
            self.containers += 1
        if self.containers > MOST_OBJECTS or len(self.memo) > 2 * MOST_OBJECTS:
            raise _Forbidden(f"it has more than {MOST_OBJECTS:,} containers")
        if opcode in _KEYED:
            keys = self.stack[-2:-1] if opcode == "SETITEM" else self.stack[::2]
            if wrong := {type(key) for key in keys} - {str, int}:
                raise _Forbidden(f"it has a {wrong.pop().__name__} as a key")


def _checked(opcode: str, act: Callable[[Any], None]) -> Callable[[Any], None]:
    def run(reader: _Reader) -> None:
        reader.check(opcode)
        act(reader)
        if opcode in _INTEGERS and reader.stack[-1].bit_length() > 8 * LONGEST_INT:
            raise _Forbidden(f"it has an integer of more than {LONGEST_INT} bytes")

    return run if opcode in {"MARK", *_CONTAINERS, *_KEYED, *_REMEMBERING, *_INTEGERS} else act


_Reader.dispatch = _Opcodes(
    (code, _checked(_NAMES[code], act)) for code, act in pickle._Unpickler.dispatch.items() if _NAMES[code] in _PLAIN
)
