"""The clock of a search: its time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from autockpt.schema import Listener, words
from autockpt.schema.trial import Measurement

OF_TRAINING = 0.1
"""The share of a training's predicted time that a search for it may take, where no time limit was given."""


TIMING, PROFILING = 0.5, 0.65
"""Shares of the time limit from which on a search does with op times by nominal rates, and without sets of choices that
take a ghost run each: the rest is for real steps."""

GRACE_SHARE, GRACE = 0.1, 2.0
"""Share of the time limit, and seconds, by which steps may exceed it."""


class Clock:
    """Wall time since it was made, and how much of a limit that leaves. ``listener`` hears of stages, trials and notes.

    ``timeout``: a time limit in seconds, which holds for the whole search, tracing and profiling included. Every stage
    asks for what is left before it begins with anything that the answer can do without. The limit becomes shorter where
    ``training_steps`` are few: see ``limit_by``.
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
        """Until steps that are being measured are broken off: a little later than the time limit."""
        return self.seconds_left if self.timeout is None else self.seconds_left + GRACE_SHARE * self.timeout + GRACE

    def passed(self, share: float) -> bool:
        """Whether more than this share of the time limit has passed."""
        return self.seconds_within(share) <= 0

    def seconds_within(self, share: float) -> float:
        """Seconds until this share of the time limit has passed; infinite without one."""
        return math.inf if self.timeout is None else share * self.timeout - self.elapsed

    def limit_by(self, measured: Iterable[Measurement | None]) -> str:
        """Shorten the time limit to a tenth of the training, as the fastest of these steps predicts its time.

        Returns the sentence that reports it; "" where the limit stays.
        """
        seconds = min((m.step_seconds for m in measured if m is not None), default=math.inf)
        share = OF_TRAINING * (self.training_steps or math.inf) * seconds
        if share >= (math.inf if self.timeout is None else self.timeout):
            return ""
        self.timeout = float(f"{share:.3g}")
        training = f"{words.counted(self.training_steps or 0, 'step')} of {words.seconds(seconds)}"
        return f"the search ends after {words.seconds(share)}, a tenth of {training}, or as soon as it has a plan"
