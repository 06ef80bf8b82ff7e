"""The exceptions that autockpt raises on purpose: each has a message, a remedy, a stable code and an exit code."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

_PASSWORDS = (
    re.compile(r"(?P<kept>://[^\s:/]*:)(?P<secret>\S*)(?=@)"),
    re.compile(
        r"(?P<kept>[?&;][^\s=&;]*(?:passw|passphrase|pwd|secret|token|odbc_connect)[^\s=&;]*=)(?P<secret>[^\s&]+)", re.I
    ),
)


class AutockptError(Exception):
    """Base of every error that autockpt raises on purpose.

    ``message`` says what is wrong and where, ``remedy`` what to do about it; the command line prints both and exits
    with ``exit_code``. ``code`` stays the same when texts change: scripts go by it.
    """

    code = "error"
    exit_code = 4
    default_remedy = ""

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        self.message = without_passwords(message)
        self.remedy = without_passwords(self.default_remedy if remedy is None else remedy)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}\n{self.remedy}" if self.remedy else self.message


class UsageError(AutockptError):
    """The question itself is wrong: a malformed budget, an unknown model, contradictory options. Exit code 2."""

    code = "usage"
    exit_code = 2


class PlanError(UsageError):
    """A plan file is malformed, or does not belong to this model. Exit code 2."""

    code = "plan"


class WorkloadError(UsageError):
    """The user's model, batch or step could not be built or run. Exit code 2."""

    code = "workload"


class RunDirectoryError(UsageError):
    """A run directory belongs to another question, is corrupt or cannot be written. Exit code 2."""

    code = "run"


class RanksError(UsageError):
    """The processes of a job do not ask one question of one sharded model. Exit code 2."""

    code = "ranks"


class InfeasibleError(AutockptError):
    """No plan fits the budget. Exit code 3.

    ``smallest_peak`` is the least reachable peak in bytes, where known; ``alternatives`` are changes of the job that
    would fit (``schema.trial.Alternative``), least change first.
    """

    code = "budget.infeasible"
    exit_code = 3

    def __init__(self, message: str, *, remedy: str | None = None, smallest_peak: int | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.smallest_peak = smallest_peak
        self.alternatives: tuple[Any, ...] = ()


class ConflictError(UsageError):
    """A plan cannot be attached here: something else already owns the layer, or it cannot be made safe. Exit code 2."""

    code = "conflict"


class RerunMismatch(ConflictError, RuntimeError):
    """Backward was given other tensors than forward had computed: its gradients are wrong. Exit code 2."""

    code = "conflict.mismatch"


class InPlaceError(ConflictError, RuntimeError):
    """A tensor that backward needs was changed in place. A RuntimeError too, as autograd's own error is."""

    code = "conflict.in_place"

    @classmethod
    def of(cls, size: Iterable[int], now: int, expected: int, what: str, remedy: str = "") -> InPlaceError:
        """In autograd's own words: a tensor of this size, ``what`` it is, and its version ``now``."""
        return cls(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(size)} {what} is at version {now}, expected {expected}",
            remedy=remedy or "Replace the in-place operation after this unit by an out-of-place one.",
        )


class TracingError(AutockptError):
    """The model could not be traced. Exit code 4."""

    code = "tracing"


class GhostError(TracingError):
    """The ghost run failed or took its process down; the caller may record a real step instead. Exit code 4."""

    code = "tracing.ghost"
    default_remedy = (
        "Let a function make the model (--model package.module:function): a copy of it, on the CPU and in a process of "
        "its own, then takes a real step to be recorded."
    )


class MeasurementError(AutockptError):
    """The device failed, or a measurement could not be completed. Exit code 4."""

    code = "measurement"


class TimeLimitReached(MeasurementError):
    """A search's time limit came before a plan that fits had been measured. Exit code 4."""

    code = "measurement.time_limit"
    default_remedy = "Allow more --timeout: the same command goes on from what is known. Or predict with --hardware."


class DeviceOutOfMemory(MeasurementError):
    """A step ran out of device memory. ``last``: why no other step can be taken after it. Exit code 4."""

    code = "memory.device"
    last: MeasurementError | None = None


class HostBudgetExceeded(DeviceOutOfMemory):
    """Offloading would claim more host memory than the host budget allows; nothing was lost. Exit code 4."""

    code = "memory.host"
    default_remedy = (
        "Raise --host-budget (host_budget= of autockpt.search, `host_budget_bytes` of a plan), offload fewer units, or "
        "write `{kind: offload, tier: disk}` for some of them where the device is an accelerator."
    )


def without_passwords(text: str, url: str = "") -> str:
    """A text with ``***`` for every password of a URL in it: ``db://user:***@host``, ``db://host?password=***``.

    What is the password of ``url`` is replaced wherever the text repeats it. A database takes a password that holds an
    unescaped ``@`` or ``/`` apart, and may name one part as its host.
    """
    for pattern in _PASSWORDS:
        for secret in (match["secret"] for match in pattern.finditer(url)):
            for part in sorted({secret, unquote(secret), *re.split("[@/]", secret)}, key=len, reverse=True):
                text = text.replace(part, "***") if len(part) > 2 else text
        text = pattern.sub(r"\g<kept>***", text)
    return text


def how_it_ended(code: int) -> str:
    """The exit code of a process in words; negative for a signal, as ``subprocess`` has it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"signal {-code}"
