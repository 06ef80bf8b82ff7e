"""Choices inside torch.compile: what the compiler cannot put into one graph says so by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def outside_graphs(kind: str, why: str, *, inside: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For an attached forward that the compiler cannot trace: it runs between two graphs.

    The unit inside it is compiled nevertheless, unless ``inside`` says that it cannot be either.
    Where a graph break is not allowed (``fullgraph=True``) the compiler's error then names the choice, with ``why`` and
    what to do. Costs nothing where nothing is being compiled.
    """
    reason = (
        f"autockpt's choice `{kind}` {why}, so its unit cannot be part of one graph. Compile without "
        "fullgraph=True, or choose save or recompute for it."
    )

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        eager = torch.compiler.disable(run, recursive=inside, reason=reason)

        @functools.wraps(run)
        def between_graphs(*args: Any, **kwargs: Any) -> Any:
            return (eager if torch.compiler.is_compiling() else run)(*args, **kwargs)

        return between_graphs

    return decorate
