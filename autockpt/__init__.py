"""Automatic activation checkpointing: decide for each layer what happens to its activations, by measured steps.

    step = autockpt.Step(model, batch, optimizer=optimizer)
    plan = autockpt.search(step, budget="24GB")
    autockpt.apply(model, plan)          # or the path of a plan.yaml

Importing this package loads neither torch nor anything else that is slow; names are resolved when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autockpt.errors import AutockptError as AutockptError
    from autockpt.integrations.transformers import AutockptCallback as AutockptCallback
    from autockpt.public import estimate as estimate
    from autockpt.public import explain as explain
    from autockpt.public import search as search
    from autockpt.public import trace as trace
    from autockpt.public import verify as verify
    from autockpt.runtime import apply as apply
    from autockpt.schema.plan import Plan as Plan
    from autockpt.schema.run_directory import open_run as open_run
    from autockpt.workload import Step as Step

__version__ = "0.1.0"

_HOME = {
    "AutockptCallback": "autockpt.integrations.transformers",
    "AutockptError": "autockpt.errors",
    "Plan": "autockpt.schema.plan",
    "Step": "autockpt.workload",
    "apply": "autockpt.runtime",
    "open_run": "autockpt.schema.run_directory",
    **dict.fromkeys(("estimate", "explain", "search", "trace", "verify"), "autockpt.public"),
}

__all__ = sorted(["__version__", *_HOME])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autockpt' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
