"""Op times kept between runs: one file per device and versions, one entry per op signature."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from autockpt.schema import Environment, OpTimes
from autockpt.schema.base import Data
from autockpt.schema.files import atomic_write, cache_directory

TABLES = 2
"""Counts how often what is timed has changed: 2, whole plans are timed as in mid-training."""


class _Table(Data):
    """``workloads`` are the fields of OpTimes that belong to one workload rather than to single ops."""

    environment: Environment
    seconds: dict[str, float] = Field(default_factory=dict)
    workloads: dict[str, dict[str, Any]] = Field(default_factory=dict)


def lookup(environment: Environment, workload: str, signatures: Iterable[str]) -> OpTimes | None:
    """Cached op times, if they cover this workload and all its signatures; None otherwise."""
    table = _read(environment)
    if table is None or workload not in table.workloads or any(s not in table.seconds for s in signatures):
        return None
    with suppress(ValidationError):
        return OpTimes(environment=environment, seconds=table.seconds, **table.workloads[workload])
    return None


def store(times: OpTimes, workload: str) -> None:
    """Add op times to the cache. A cache that cannot be written is no error: the next run measures again."""
    known = _read(times.environment) or _Table(environment=times.environment)
    own = times.model_dump(exclude={"environment", "seconds"})
    table = _Table(
        environment=times.environment,
        seconds=known.seconds | times.seconds,
        workloads=known.workloads | {workload: own},
    )
    with suppress(OSError):
        atomic_write(_path(times.environment), table.model_dump_json(), parents=True)


def forget(environment: Environment, workloads: Iterable[str]) -> None:
    """Have the next runs of these workloads measure again."""
    if (table := _read(environment)) is None:
        return
    left = {name: own for name, own in table.workloads.items() if name not in {*workloads}}
    with suppress(OSError):
        atomic_write(_path(environment), table.model_copy(update={"workloads": left}).model_dump_json())


def _read(environment: Environment) -> _Table | None:
    with suppress(OSError, ValidationError):
        return _Table.model_validate_json(_path(environment).read_bytes())
    return None


def _path(environment: Environment) -> Path:
    text = json.dumps([TABLES, environment.model_dump(mode="json")], sort_keys=True)
    return cache_directory() / "op_times" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
