"""The known word nearest to a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def closest(word: str, known: Iterable[str]) -> str | None:
    """The nearest known word, or None where none is near."""
    by_lower = {k.lower(): k for k in known}
    found = get_close_matches(str(word).lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``Did you mean recompute? ``, to begin a remedy with; empty where no known word is near."""
    near = closest(word, known)
    return f"Did you mean {near}? " if near else ""
