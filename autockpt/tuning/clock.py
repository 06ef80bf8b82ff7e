"""The time limit of a search: how much of it is left, and how long each stage may take."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from autockpt.schema import Listener, words
from autockpt.schema.trial import Measurement

OF_TRAINING = 0.1
"""The share of a training's predicted time that a search for it may take, where no time limit was given."""


TIMING, PROFILING, LAST_START = 0.5, 0.65, 0.85
"""Shares of the time limit after which ops are no longer timed (nominal rates rank choices), and further choices no
longer ghost-run, as the rest is for real steps; and after which no further search begins: tracing alone would take the
rest."""

GRACE_SHARE, GRACE = 0.1, 2.0
"""Share of the time limit, and seconds, by which steps may exceed it."""


class Clock:
    """Wall time since the search began, and what it leaves of the time limit. ``listener`` is notified of the progress.

    ``timeout`` is the limit in seconds for the whole search, tracing and profiling included. Every stage asks what is
    left before it begins with anything optional. ``limit_by`` shortens the limit where ``training_steps`` are few.
    """

    def __init__(self, listener: Listener, timeout: float | None = None, training_steps: int | None = None) -> None:
        self.listener, self.timeout = listener, timeout
        self.training_steps = training_steps
        self.began = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Wall seconds since this clock was made."""
        return time.monotonic() - self.began

    @property
    def seconds_left(self) -> float:
        """Of the time limit; infinite without one."""
        return math.inf if self.timeout is None else self.timeout - self.elapsed

    @property
    def seconds_until_stopped(self) -> float:
        """Until steps that are being measured are aborted, a little later than the time limit."""
        return self.seconds_left if self.timeout is None else self.seconds_left + GRACE_SHARE * self.timeout + GRACE

    def passed(self, share: float) -> bool:
        """Whether more than this share of the time limit has passed."""
        return self.seconds_within(share) <= 0

    def timeout_of(self, share: float) -> float | None:
        """The time limit of another search, in seconds: this share of what is left; None without a limit."""
        return None if self.timeout is None else max(1.0, share * self.seconds_left)

    def seconds_within(self, share: float) -> float:
        """Seconds until this share of the time limit has passed; infinite without one."""
        return math.inf if self.timeout is None else share * self.timeout - self.elapsed

    def limit_by(self, measured: Iterable[Measurement | None]) -> str:
        """Shorten the time limit to a tenth of the training's time, predicted from the fastest of these steps.

        Returns a note on it, "" where the limit stays.
        """
        seconds = min((m.step_seconds for m in measured if m is not None), default=math.inf)
        share = OF_TRAINING * (self.training_steps or math.inf) * seconds
        if share >= (math.inf if self.timeout is None else self.timeout):
            return ""
        self.timeout = float(f"{share:.3g}")
        training = f"{words.counted(self.training_steps or 0, 'step')} of {words.seconds(seconds)}"
        return f"the search ends after {words.seconds(share)}, a tenth of {training}, or as soon as it has a plan"
