"""How long a stage will take: by its steps that are over, and by how long it took the last time on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

from pydantic import Field, ValidationError

from autockpt.schema.base import Data
from autockpt.schema.files import atomic_write, cache_directory

MOST = 200  # subjects that are kept, the latest
FIRST_TIME = {"trace": 8.0, "build": 4.0, "build the model": 8.0}
"""Seconds of stages that are mostly imports, where no command ran yet: as long as on two cores of a server."""
Taken = tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], Annotated[int, Field(ge=0)]]
"""Seconds of a stage, and its steps, or 0 where they are not known."""


class _Table(Data):
    """What stages took, by subject, the oldest first, and by the stage's name."""

    subjects: dict[str, dict[str, Taken]] = Field(default_factory=dict)


class StageTimes:
    """Where the present stage of a command is, and how long it takes yet. ``clock`` returns seconds.

    What stages took is kept in the user's cache directory under the ``subject`` (a verb and what it is asked about; "":
    nothing is read or kept). Where most of a stage is imports, it takes for a new subject about what it took for the
    latest other one, and before any command ran here, what it takes elsewhere. A cache that cannot be read or written
    is no error.
    """

    def __init__(self, subject: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._subject, self.clock = subject, clock
        self._path = cache_directory() / "stage_seconds.json"
        self._known = self._read() if subject else {}
        self._took: dict[str, Taken] = {}
        self._began = self._came = clock()
        self.name, self.total, self.done = "", 0, 0
        self._expected: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the present stage began."""
        return self.clock() - self._began

    def begin(self, name: str, total: int | None) -> None:
        """A stage begins, and the one before it has ended; ``total`` steps where known."""
        self._end()
        self.name, self.total, self.done = name, total or 0, 0
        self._began = self._came = self.clock()
        self._expected = self._by_the_last_time()

    def advance(self, steps: int) -> None:
        """The present stage came so many steps further."""
        self.done += steps
        self._came = self.clock()

    def left(self) -> float | None:
        """Seconds until the present stage ends; None where nothing tells.

        By the steps that are over, which count the more the more of them there are, and by the last time, as long as it
        has not taken longer.
        """
        now = self.clock()
        elapsed, since = now - self._began, now - self._came
        known = self._expected - elapsed if self._expected is not None and self._expected > elapsed else None
        if not 0 < self.done < self.total:
            return known
        # of the steps that are over, or as far as the present one has come
        each = max((elapsed - since) / self.done, elapsed / (self.done + 1))
        left = max(each, each * (self.total - self.done) - since)
        return left if known is None else known + (left - known) * self.done / self.total

    def close(self, complete: bool) -> None:
        """Keep what stages took, for the next time; the last one's only where it was ``complete``."""
        if complete:
            self._end()
        if not self._subject or not self._took:
            return
        known = self._read()  # others may have written meanwhile
        own = known.pop(self._subject, {}) | self._took
        with suppress(OSError):
            table = _Table(subjects=dict([*known.items(), (self._subject, own)][-MOST:]))
            atomic_write(self._path, table.model_dump_json(), parents=True)

    def _end(self) -> None:
        if self.name:
            self._took[self.name] = self.clock() - self._began, self.total

    def _by_the_last_time(self) -> float | None:
        own = self._known.get(self._subject, {})
        others = reversed(self._known.values()) if self.name in FIRST_TIME else ()
        taken = next((known[self.name] for known in (own, *others) if self.name in known), None)
        if taken is None:
            return FIRST_TIME.get(self.name) if self._subject else None
        seconds, steps = taken
        return seconds * self.total / steps if self.total and steps else seconds

    def _read(self) -> dict[str, dict[str, Taken]]:
        with suppress(OSError, ValidationError):
            return dict(_Table.model_validate_json(self._path.read_bytes()).subjects)
        return {}
