"""The base of all data objects: frozen, closed to unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

Facts = dict[str, str | int | float | bool | None]
"""Settings of a step as they came out, by name."""


class Data(BaseModel):
    """A frozen record; unknown keys are errors. Safe to hash, compare, send between processes and write to disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")
