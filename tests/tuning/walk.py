"""The files that a search's request walks through: those entered by calls that pass the request or the question on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import autockpt
from autockpt.schema import SearchRequest
from autockpt.tuning.question import Question

ROOT = Path(autockpt.__file__).parent


def files_entered(search: Callable[[], Any]) -> set[str]:
    """Source files of functions that are called with a request or a question among their arguments, relative to the
    package; ``search`` runs one."""
    found: set[str] = set()
    carried = (SearchRequest, Question)

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(ROOT)) or code.co_name == "<genexpr>":
            return
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(isinstance(frame.f_locals.get(name), carried) for name in arguments):
            found.add(str(Path(code.co_filename).relative_to(ROOT)))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        search()
    finally:
        sys.setprofile(before)
    return found
