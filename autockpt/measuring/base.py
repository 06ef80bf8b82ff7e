"""The interface of a measurer: what a search asks of the process, or processes, that take real steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

from autockpt.interpreter import patched
from autockpt.schema.choices import Choice
from autockpt.schema.device import Environment
from autockpt.schema.request import Listener
from autockpt.schema.trial import Measurement
from autockpt.workload.step import ignore

Choices = Mapping[str, Choice]
TIMED_CYCLE = "timed cycle"
"""The beat after each cycle that was timed."""
SECONDS_PER_PLAN = 1.5
"""Of timed cycles, at least three and at most ten of them."""


class Measurer:
    """Measures plans on one workload and one device. ``choices`` name exact units; units left out save everything.

    Requests are methods of ``StepRunner`` with their arguments, wherever that runs.
    """

    environment: Environment
    """The device and versions that the numbers belong to."""
    beat: Callable[[str], None] = staticmethod(ignore)
    """Called with a word whenever a part of the work has ended, such as a cycle: a sign of life."""

    def measure(self, choices: Choices, *, steps: int = 5, budget_bytes: int | None = None) -> Measurement:
        """Peak bytes and the median seconds of ``steps`` whole cycles with a plan attached.

        Raises DeviceOutOfMemory where it does not fit the device, or the budget on devices that enforce one; elsewhere
        the caller compares the peak with the budget. Raises MeasurementError where the device fails.
        """
        return self._ask("measure", choices=dict(choices), steps=steps, budget_bytes=budget_bytes)

    def compare(self, plans: Mapping[str, Choices], *, rounds: int = 5) -> dict[str, list[float]]:
        """Seconds of one cycle of each plan by round, interleaved: result[a][i] pairs with result[b][i]."""
        plans = {name: dict(choices) for name, choices in plans.items()}
        return self._ask("compare", plans=plans, rounds=rounds)

    def call(self, ref: str, payload: dict[str, Any]) -> Any:
        """Run ``"autockpt.module:function"`` as ``function(runner, payload)`` in the model's process, by pickle."""
        return self._ask("call", ref=ref, payload=payload)

    def _ask(self, verb: str, **arguments: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        """Release everything. May be called more than once."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def cycles_to_time(seconds: float) -> int:
    """The number of cycles to time of a plan whose step takes ``seconds``."""
    return max(3, min(10, round(SECONDS_PER_PLAN / max(seconds, 1e-3))))


def beats_counted(measurer: Measurer, listener: Listener, word: str = TIMED_CYCLE) -> AbstractContextManager[None]:
    """Report every beat of this ``word`` within the block to the listener, as a step of its stage."""
    return patched(measurer, "beat", lambda beat: listener.advance() if beat == word else None)
