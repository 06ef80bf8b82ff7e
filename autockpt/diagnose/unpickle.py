"""Pickles as data: containers, text, numbers, booleans and None, and nothing that could run code.

Python's own unpickler, with globals refused, would still give a few bytes all memory there is (``LONG_BINPUT`` sizes
its memo by an index from the file). So this reads the opcodes that such data consists of, by itself, and refuses the
others by name. See pickletools for what each does.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from pathlib import Path
from struct import unpack
from typing import Any

from autockpt.errors import UsageError

LARGEST_FILE = 1 << 29
DEEPEST = 64  # containers open at once
MOST_CONTAINERS = 8_000_000
LONGEST_INT = 16  # bytes
_NAMES = {op.code: op.name for op in pickletools.opcodes}
_REMEDY = (
    "Only what torch.cuda.memory._dump_snapshot writes is read; nothing of the file was executed. If you trust where "
    "it is from, write the snapshot again with torch.cuda.memory._dump_snapshot(FILE)."
)
_MARK = object()


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
    reader = _Reader(data)
    try:
        return reader.read()
    except _Ended:
        raise Refused(
            f"{name} is cut off: it ends after {len(data):,} bytes, in the middle",
            remedy="The run may have died while it wrote it, or a copy is incomplete: write or copy it again.",
        ) from None
    except (IndexError, KeyError, ValueError, TypeError, OverflowError):
        where = f"byte {min(reader.at, len(data)):,} of {len(data):,}"
        raise Refused(f"{name} is no pickle of plain data: broken at {where}", remedy=_REMEDY) from None
    except _Forbidden as error:
        raise Refused(f"{name} is refused: {error} at byte {reader.at:,}", remedy=_REMEDY) from None


class _Ended(Exception):
    """The bytes end before the pickle does."""


class _Forbidden(Exception):
    """An opcode or a shape that plain data does not have, in words."""


class _Reader:
    """A pickle machine with a stack and a memo, and only the opcodes of plain data."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.marks = self.containers = 0

    def read(self) -> Any:
        data, handlers = self.data, _HANDLERS
        while True:
            if self.at >= len(data):
                raise _Ended
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                if len(self.stack) != 1 or self.stack[0] is _MARK:
                    raise ValueError("not one value")
                return self.stack[0]
            handler = handlers.get(code)
            if handler is None:
                raise _Forbidden(self._said(code))
            handler(self)

    def _said(self, code: int) -> str:
        name = _NAMES.get(chr(code), f"0x{code:02x}")
        if name == "GLOBAL":
            named = f"{self._line()}.{self._line()}"[:160]
            return f"it names the Python object {named!r} (opcode GLOBAL)"
        if name in ("STACK_GLOBAL", "INST") and len(self.stack) >= 2:
            named = ".".join(str(part)[:80] for part in self.stack[-2:] if part is not _MARK)
            return f"it names the Python object {named!r} (opcode {name})"
        return f"opcode {name}, which plain data does not have,"

    def take(self, count: int) -> bytes:
        start, self.at = self.at, self.at + count
        if count < 0 or self.at > len(self.data):
            raise _Ended
        return self.data[start : self.at]

    def number(self, form: str, size: int) -> int:
        return unpack(form, self.take(size))[0]

    def _line(self) -> str:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise _Ended
        line = self.data[self.at : end]
        self.at = end + 1
        return line.decode("raw-unicode-escape")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def contain(self, value: Any) -> None:
        """Push a new container."""
        self.containers += 1
        if self.containers > MOST_CONTAINERS:
            raise _Forbidden(f"it has more than {MOST_CONTAINERS:,} containers")
        self.stack.append(value)

    def mark(self) -> None:
        self.marks += 1
        if self.marks > DEEPEST:
            raise _Forbidden(f"it nests more than {DEEPEST} containers")
        self.stack.append(_MARK)

    def marked(self) -> list[Any]:
        """What lies above the last mark, which goes."""
        index = len(self.stack) - 1
        while self.stack[index] is not _MARK:
            index -= 1
            if index < 0:
                raise ValueError("no mark")
        items = self.stack[index + 1 :]
        del self.stack[index:]
        self.marks -= 1
        return items

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark where a value should be")
        return value

    def drop(self) -> None:
        if self.stack.pop() is _MARK:
            self.marks -= 1

    def drop_marked(self) -> None:
        self.marked()

    def top(self, kind: type) -> Any:
        value = self.stack[-1]
        if type(value) is not kind:
            raise _Forbidden(f"it builds a {type(value).__name__} as a {kind.__name__}")
        return value

    def text(self, size: int) -> None:
        self.push(self.take(size).decode("utf-8", errors="surrogatepass"))

    def text_line(self) -> None:
        self.push(self._line())

    def integer(self, size: int) -> None:
        if not 0 <= size <= LONGEST_INT:
            raise _Forbidden(f"it has an integer of {size} bytes")
        self.push(int.from_bytes(self.take(size), "little", signed=True))

    def int_line(self) -> None:
        line = self._line().removesuffix("L")
        if len(line) > 40:
            raise _Forbidden("it has an integer of more than 40 digits")
        self.push({"00": False, "01": True}[line] if line in ("00", "01") else int(line))

    def float_line(self) -> None:
        self.push(float(self._line()))

    def double(self) -> None:
        self.push(unpack(">d", self.take(8))[0])

    def append(self) -> None:
        value = self.pop()
        self.top(list).append(value)

    def extend(self) -> None:
        items = self.marked()
        self.top(list).extend(items)

    def tuple_of(self, count: int) -> None:
        items = tuple(self.pop() for _ in range(count))[::-1]
        self.contain(items)

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        _fill(self.top(dict), [key, value])

    def set_items(self) -> None:
        items = self.marked()
        _fill(self.top(dict), items)

    def new_dict(self) -> None:
        items = self.marked()
        self.contain({})
        _fill(self.stack[-1], items)

    def remember(self, index: int) -> None:
        if self.stack[-1] is _MARK or index < 0:
            raise ValueError("nothing to remember")
        self.memo[index] = self.stack[-1]

    def skip(self, size: int) -> None:
        self.take(size)


def _fill(target: dict[Any, Any], items: list[Any]) -> None:
    if len(items) % 2:
        raise ValueError("a key without a value")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # hashing a tuple that holds a tuple that … can exhaust the C stack
        if type(key) not in (str, int):
            raise _Forbidden(f"it has a {type(key).__name__} as a key")
        target[key] = value


def _constant(value: Any) -> Callable[[_Reader], None]:
    return lambda r: r.push(value)


_HANDLERS: dict[int, Callable[[_Reader], None]] = {
    0x80: lambda r: r.skip(1),  # PROTO
    0x95: lambda r: r.skip(8),  # FRAME
    ord("("): _Reader.mark,
    ord("0"): _Reader.drop,
    ord("1"): _Reader.drop_marked,
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord("J"): lambda r: r.push(r.number("<i", 4)),
    ord("K"): lambda r: r.push(r.number("<B", 1)),
    ord("M"): lambda r: r.push(r.number("<H", 2)),
    0x8A: lambda r: r.integer(r.number("<B", 1)),  # LONG1
    0x8B: lambda r: r.integer(r.number("<i", 4)),  # LONG4
    ord("I"): _Reader.int_line,
    ord("L"): _Reader.int_line,
    ord("F"): _Reader.float_line,
    ord("G"): _Reader.double,
    0x8C: lambda r: r.text(r.number("<B", 1)),  # SHORT_BINUNICODE
    ord("X"): lambda r: r.text(r.number("<I", 4)),  # BINUNICODE
    0x8D: lambda r: r.text(r.number("<Q", 8)),  # BINUNICODE8
    ord("V"): _Reader.text_line,
    ord("]"): lambda r: r.contain([]),
    ord("a"): _Reader.append,
    ord("e"): _Reader.extend,
    ord("l"): lambda r: r.contain(r.marked()),
    ord(")"): lambda r: r.push(()),
    ord("t"): lambda r: r.contain(tuple(r.marked())),
    0x85: lambda r: r.tuple_of(1),
    0x86: lambda r: r.tuple_of(2),
    0x87: lambda r: r.tuple_of(3),
    ord("}"): lambda r: r.contain({}),
    ord("d"): _Reader.new_dict,
    ord("s"): _Reader.set_item,
    ord("u"): _Reader.set_items,
    ord("q"): lambda r: r.remember(r.number("<B", 1)),
    ord("r"): lambda r: r.remember(r.number("<I", 4)),
    ord("p"): lambda r: r.remember(int(r._line())),
    0x94: lambda r: r.remember(len(r.memo)),  # MEMOIZE
    ord("h"): lambda r: r.push(r.memo[r.number("<B", 1)]),
    ord("j"): lambda r: r.push(r.memo[r.number("<I", 4)]),
    ord("g"): lambda r: r.push(r.memo[int(r._line())]),
}
