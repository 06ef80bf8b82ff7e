"""The files that a search's request walks through: those entered by calls that pass the request on."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import autockpt
from autockpt.schema import SearchRequest

ROOT = Path(autockpt.__file__).parent


def files_entered(search: Callable[[], Any]) -> set[str]:
    """Source files of functions that are called with a request among their arguments, relative to the
    package; ``search`` runs one."""
    found: set[str] = set()
    carried = SearchRequest

    @functools.cache
    def arguments(code: CodeType) -> tuple[str, ...]:
        ours = code.co_filename.startswith(str(ROOT)) and code.co_name != "<genexpr>"
        return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if ours else ()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        names = arguments(frame.f_code)
        if names and any(isinstance(frame.f_locals.get(name), carried) for name in names):
            found.add(str(Path(frame.f_code.co_filename).relative_to(ROOT)))

    before = sys.gettrace()
    sys.settrace(watch)  # calls only, as it returns nothing that would watch the lines
    try:
        search()
    finally:
        sys.settrace(before)
    return found
