"""Sizes and budgets as people write them: parsed strictly, resolved to bytes, printed in both units."""

from __future__ import annotations

import re
from decimal import ROUND_FLOOR, Decimal
from typing import Literal

from pydantic import Field

from autockpt.errors import UsageError
from autockpt.schema.base import Data
from autockpt.schema.device import WITHOUT_STREAMS

_UNITS = {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)} | {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,9})?"
_SIZE = re.compile(rf"({_NUMBER}) ?({'|'.join(_UNITS)})")
_SHARE = re.compile(rf"({_NUMBER}) ?%(act)?")
_LOOSE = re.compile(rf"\s*({_NUMBER})\s*([kmgt])?i?b?\s*", re.IGNORECASE)
_LARGEST = 2**60
_FORMS = "Write a size with its unit (24GB, 24GiB), a share of this job's own peak (60%, 60%act), or auto."

BudgetKind = Literal["bytes", "share", "activation_share", "auto"]


class Budget(Data):
    """A memory budget as it was asked for; ``resolve`` turns it into bytes once the job's own peaks are known."""

    text: str
    kind: BudgetKind
    size: int | None = Field(default=None, description="bytes, where kind is bytes")
    share: float | None = Field(default=None, description="0 < share <= 1, where kind is a share")

    def __str__(self) -> str:
        return self.text

    def resolve(self, save_all_peak: int, leanest_peak: int, capacity: int) -> int:
        """The budget in bytes.

        ``save_all_peak`` and ``leanest_peak`` are this job's peaks in bytes when every unit saves everything and when
        each does what needs least; ``capacity`` is what the device has for this job.
        """
        if self.kind == "bytes":
            return int(self.size or 0)
        if self.kind == "share":
            return int(save_all_peak * (self.share or 0.0))
        if self.kind == "activation_share":
            return leanest_peak + int((save_all_peak - leanest_peak) * (self.share or 0.0))
        return capacity

    def describe(self) -> str:
        """In words, for the terminal."""
        if self.kind == "bytes":
            return format_bytes(self.size or 0)
        if self.kind == "share":
            return f"{self.text} of this job's own save-everything peak"
        if self.kind == "activation_share":
            return f"{self.text[:-3]} of the activation range (leanest plan to save-everything)"
        return "all that the device has"


class ResolvedBudget(Data):
    """A budget in bytes, with the words it was asked in and what it covers."""

    asked: str
    bytes: int
    covers: str = ""


def covers(device_kind: str) -> str:
    """What a budget covers on a kind of device, in words."""
    held = "weights, buffers, gradients, optimizer states, activations and transients of a whole step"
    if device_kind == "cuda":
        return f"{held}, as reserved by the allocator, and the CUDA context"
    if device_kind in WITHOUT_STREAMS:
        return f"{held}; not memory-mapped files, which offloaded activations lie in"
    return f"{held}, as reserved by the allocator"


def parse_size(text: str) -> int:
    """Bytes from a size with its unit: 24GB is 24·10⁹, 24GiB is 24·2³⁰. Raises UsageError for anything else."""
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(f"{text!r} is not a memory size", remedy=_suggestion(text))
    size = int((Decimal(match[1]) * _UNITS[match[2]]).to_integral_value(ROUND_FLOOR))
    if not 0 < size <= _LARGEST:
        raise UsageError(
            f"{text!r} is {'less than one byte' if not size else 'more than any device has'}", remedy=_FORMS
        )
    return size


def parse_budget(text: str | Budget) -> Budget:
    """A budget from ``24GB``, ``24GiB``, ``60%``, ``60%act`` or ``auto``.

    Full match only: bare numbers, signs, other spaces and other units raise UsageError with a remedy.
    """
    if isinstance(text, Budget):
        return text
    if not isinstance(text, str):
        raise UsageError(f"a budget of {text!r} has no unit", remedy=_suggestion(text))
    if text == "auto":
        return Budget(text=text, kind="auto")
    if (match := _SHARE.fullmatch(text)) is not None:
        share = Decimal(match[1]) / 100
        if not 0 < share <= 1:
            raise UsageError(
                f"a budget of {text!r} is {'nothing' if share <= 0 else 'more than saving everything takes'}",
                remedy="Give a share above 0% and up to 100%, or auto for all that the device has.",
            )
        return Budget(text=text, kind="activation_share" if match[2] else "share", share=float(share))
    try:
        return Budget(text=text, kind="bytes", size=parse_size(text))
    except UsageError as error:
        raise UsageError(error.message.replace("a memory size", "a budget"), remedy=error.remedy) from None


def _suggestion(text: object) -> str:
    """What the person may have meant, in front of the accepted forms."""
    loose = _LOOSE.fullmatch(str(text))
    if loose is None or not loose[1].strip("0."):
        return _FORMS
    letter = (loose[2] or "G").upper()
    return f"Did you mean {loose[1]}{letter}B or {loose[1]}{letter}iB? {_FORMS}"


def _scaled(size: float, step: int, names: tuple[str, ...]) -> str:
    """Three significant digits in the largest unit that keeps the number at 1 or more."""
    value, name = float(abs(size)), "B"
    for name in names:
        # 999.5 and more would print as 1000: go one unit up
        if value < (step if step == 1024 else 999.5) or name == names[-1]:
            break
        value /= step
    digits = 0 if name == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{'-' if size < 0 else ''}{value:.{digits}f} {name}"


def format_binary(size: float) -> str:
    """Bytes as ``23.5 GiB``."""
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_decimal(size: float) -> str:
    """Bytes as ``25.2 GB``."""
    return _scaled(size, 1000, ("B", "KB", "MB", "GB", "TB"))


def format_bytes(size: float) -> str:
    """Bytes in both units: ``23.5 GiB (25.2 GB)``; below one KiB just ``512 B``."""
    return format_binary(size) if abs(size) < 1000 else f"{format_binary(size)} ({format_decimal(size)})"
