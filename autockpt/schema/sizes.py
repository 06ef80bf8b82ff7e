"""Sizes and memory budgets: parsed as people write them, resolved to bytes, printed in both units."""

from __future__ import annotations

import math
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
_SIZES = "Write a size with its unit (24GB, 24GiB)."
_FORMS = "Write a size with its unit (24GB, 24GiB), a share of this job's own peak (60%, 60%act), or auto."

SIMULATED_HEADROOM = "5%"
"""Left free of a budget in bytes where steps are simulated, unless asked otherwise. All of 44 peaks that others
published would have been within their budget without it, where the code of their versions of transformers was
simulated; these versions move peaks by 5 to 22 % (results/published_gpu_202611). A share of the job's own peak is of a
peak that is simulated alike, so has none."""

BudgetKind = Literal["bytes", "share", "activation_share", "auto"]


class Budget(Data):
    """A memory budget as it was asked for; ``resolved`` gives its bytes once the job's own peaks are known."""

    text: str
    kind: BudgetKind
    size: int | None = Field(default=None, description="bytes, where kind is bytes")
    share: float | None = Field(default=None, description="0 < share <= 1, where kind is a share")
    headroom: str = Field(default="", description="left free of it: 2%, 500MB; empty: nothing")

    def __str__(self) -> str:
        return self.text

    @property
    def budget_bytes(self) -> int | None:
        """Bytes, headroom taken off; None where they depend on the job or the device."""
        return self.resolved(0, 0, 0).bytes if self.kind == "bytes" else None

    def resolved(
        self, save_all_peak: int, leanest_peak: int, capacity: int, device_kind: str | None = None
    ) -> ResolvedBudget:
        """The budget less its headroom, in bytes, with the words it was asked in and what it covers on this device.

        ``save_all_peak`` and ``leanest_peak`` are this job's peaks in bytes when every unit saves everything and when
        each does what needs least, with a plain output head; in compiled training when every layer recomputes.
        ``capacity`` is what the device has for this job.
        """
        above = leanest_peak if self.kind == "activation_share" else 0
        whole = capacity if self.kind == "auto" else self.size or 0
        if self.share is not None:
            whole = above + int((save_all_peak - above) * self.share)
        size = max(1, whole - headroom_of(self.headroom, whole)) if self.headroom else whole
        return ResolvedBudget(
            asked=self.text,
            bytes=size,
            covers=covers(device_kind) if device_kind else "",
            headroom=self.headroom,
            headroom_bytes=whole - size,
        )

    def refuse_share(self, why: str) -> None:
        """Raise UsageError for a share of the job's own peak, which ``why`` says to be no one figure."""
        if self.is_share:
            raise UsageError(
                f"a budget of {self.text} is a share of this job's own peak, which {why}",
                remedy="Give the budget in bytes (24GB), or auto.",
            )

    @property
    def is_share(self) -> bool:
        """Whether it is a share of the job's own peak."""
        return self.kind in ("share", "activation_share")

    def with_headroom(self, text: str | None, *, simulated: bool = False) -> Budget:
        """The same budget with so much left free (``2%`` of it, ``500MB``); ``0%``: nothing.

        None: what it leaves free already, else nothing where steps are measured, ``SIMULATED_HEADROOM`` of a budget in
        bytes where they are ``simulated``. Raises UsageError for anything else, and where nothing of a budget in bytes
        would be left.
        """
        if text is None:
            if self.headroom or not simulated or self.is_share:
                return self
            text = SIMULATED_HEADROOM
        if headroom_of(text, self.size or 0) >= (self.size or 0) and self.kind == "bytes":
            raise UsageError(
                f"a headroom of {text} leaves nothing of a budget of {self.text}",
                remedy="Give less headroom, or more budget.",
            )
        return self.model_copy(update={"headroom": text if headroom_of(text, 1) else ""})


class ResolvedBudget(Data):
    """A budget in bytes, with the words it was asked in and what it covers.

    ``bytes`` are what plans are compared with: what was asked for, less ``headroom_bytes``.
    """

    asked: str
    bytes: int = Field(ge=0)
    covers: str = ""
    headroom: str = ""
    headroom_bytes: int = Field(default=0, ge=0)

    @property
    def whole(self) -> int:
        """Bytes as they were asked for: what was left free of them is there for what no prediction knew."""
        return self.bytes + self.headroom_bytes

    @property
    def words(self) -> str:
        """The budget as it was asked for: ``24GB``, or ``24GB less 5%``."""
        return f"{self.asked} less {self.headroom}" if self.headroom else self.asked


def covers(device_kind: str) -> str:
    """What a budget covers on a kind of device, in words."""
    held = "weights, buffers, gradients, optimizer states, activations and transients of a whole step"
    if device_kind == "cuda":
        return f"{held}, as reserved by the allocator, and the CUDA context"
    if device_kind in WITHOUT_STREAMS:
        return f"{held}; not memory-mapped files, which offloaded activations lie in"
    return f"{held}, as reserved by the allocator"


def parse_size(text: str, what: str = "a memory size", remedy: str = "", forms: str = _SIZES) -> int:
    """Bytes from a size with its unit: 24GB is 24·10⁹, 24GiB is 24·2³⁰. Raises UsageError for anything else.

    ``what`` the size is, what else it may be (``forms``), and a ``remedy`` of its own, are for the error.
    """
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(f"{text!r} is not {what}", remedy=remedy or _suggestion(text, forms))
    size = int((Decimal(match[1]) * _UNITS[match[2]]).to_integral_value(ROUND_FLOOR))
    if not 0 < size <= _LARGEST:
        problem = "less than one byte" if not size else "more than any device has"
        raise UsageError(f"{text!r} is {problem}", remedy=remedy or forms)
    return size


def parse_budget(text: str | Budget) -> Budget:
    """A budget from ``24GB``, ``24GiB``, ``60%``, ``60%act`` or ``auto``.

    Full match only: bare numbers, signs, other spaces and other units raise UsageError with a remedy.
    """
    if isinstance(text, Budget):
        return text
    if not isinstance(text, str):
        raise UsageError(f"a budget of {text!r} has no unit", remedy=_suggestion(text, _FORMS))
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
    return Budget(text=text, kind="bytes", size=parse_size(text, "a budget", forms=_FORMS))


def headroom_of(text: str, budget_bytes: int) -> int:
    """Bytes to leave free of a budget, from ``2%`` of it or ``500MB``, a part of a byte counting as one.

    Raises UsageError for anything else.
    """
    if isinstance(text, str) and (match := _SHARE.fullmatch(text)) is not None and not match[2]:
        share = Decimal(match[1]) / 100
        if share >= 1:
            raise UsageError(
                f"a headroom of {text!r} leaves nothing of the budget", remedy="Give a share from 0% to below 100%."
            )
        return math.ceil(share * budget_bytes)
    remedy = "Write a share of the budget (2%) or a size with its unit (500MB, 500MiB); 0% leaves nothing free."
    return parse_size(text, "a headroom", remedy)


def _suggestion(text: object, forms: str) -> str:
    """What the user may have meant, in front of the accepted forms."""
    loose = _LOOSE.fullmatch(str(text))
    if loose is None or not loose[1].strip("0."):
        return forms
    letter = (loose[2] or "G").upper()
    return f"Did you mean {loose[1]}{letter}B or {loose[1]}{letter}iB? {forms}"


def three(value: float) -> str:
    """Three significant digits of a number of 1 or more."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def scaled(size: float, step: int, names: tuple[str, ...]) -> str:
    """Three significant digits in the largest unit that keeps the number at 1 or more; whole ones of the smallest."""
    value, name = float(abs(size)), names[0]
    for name in names:
        # 999.5 and more would print as 1000: go one unit up
        if value < (step if step == 1024 else 999.5) or name == names[-1]:
            break
        value /= step
    return f"{'-' if size < 0 else ''}{f'{value:.0f}' if name == names[0] else three(value)} {name}"


def format_binary(size: float) -> str:
    """Bytes as ``23.5 GiB``."""
    return scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_decimal(size: float) -> str:
    """Bytes as ``25.2 GB``."""
    return scaled(size, 1000, ("B", "KB", "MB", "GB", "TB"))


def format_bytes(size: float) -> str:
    """Bytes in both units: ``23.5 GiB (25.2 GB)``; below one KiB just ``512 B``."""
    return format_binary(size) if abs(size) < 1000 else f"{format_binary(size)} ({format_decimal(size)})"
