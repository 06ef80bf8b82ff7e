"""Op times kept between runs: one file per device, versions and workload.

Searches that run at the same time write different files, and each is written whole, so that none loses what another
one measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from autockpt.schema import Environment, OpTimes
from autockpt.schema.files import atomic_write, cache_directory

VERSION = 3
"""Changes with what a file holds, and with how ops are timed: 2, whole plans are timed as in mid-training."""


def lookup(environment: Environment, workload: str, signatures: Iterable[str]) -> OpTimes | None:
    """Cached op times of this workload, if they cover all ``signatures``; None otherwise."""
    known = _read(_path(environment, workload))
    return known if known is not None and known.seconds.keys() >= {*signatures} else None


def store(times: OpTimes, workload: str) -> None:
    """Add op times to those of the workload. If the cache cannot be written, the next run measures again."""
    path = _path(times.environment, workload)
    known = _read(path)
    with suppress(OSError):
        atomic_write(path, (times if known is None else times.completed(known)).model_dump_json(), parents=True)


def forget(environment: Environment, workload: str) -> None:
    """Have the next run of this workload measure again."""
    with suppress(OSError):
        _path(environment, workload).unlink()


def _read(path: Path) -> OpTimes | None:
    with suppress(OSError, ValidationError):
        return OpTimes.model_validate_json(path.read_bytes())
    return None


def _path(environment: Environment, workload: str) -> Path:
    text = json.dumps([VERSION, environment.model_dump(mode="json"), workload], sort_keys=True)
    return cache_directory() / "op_times" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
