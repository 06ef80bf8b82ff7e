"""The measurer that runs a worker process, so that no crash or out-of-memory error of a trial ends the search."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from autockpt.devices import get_device
from autockpt.errors import AutockptError, DeviceOutOfMemory, MeasurementError, TimeLimitReached, how_it_ended
from autockpt.interpreter import patched
from autockpt.measuring.base import Measurer
from autockpt.measuring.local import refuse_many_processes
from autockpt.process import Child, ChildDied, ChildSilent, child_environment, last_lines
from autockpt.schema.device import Environment
from autockpt.schema.plan import CompileMode
from autockpt.schema.workload import WorkloadSpec

_MODULE = "autockpt.measuring.worker"
_SIGKILL = -9
# A worker says something after every cycle. The largest models on the slowest devices need minutes for one.
PATIENCE_SECONDS = 1800.0


class WorkerMeasurer(Measurer):
    """Measures a workload in a process of its own, in which the model is built once.

    The worker starts at once and builds the model in the background. The first request waits for it, and raises errors
    of building (WorkloadError with message and place where the user's code raised). A worker that dies, or is killed
    after ``patience`` seconds of silence, is replaced at the next request. ``host_budget`` (bytes that offloading may
    claim on the host) and ``compile`` (every layer or the whole model) hold for all requests. ``log`` is the workers'
    output.

    To be closed, or used as a context manager; at the latest the worker ends with this process. Raises UsageError in
    one of several processes that train together, as each would measure on the same device.
    """

    def __init__(
        self,
        spec: WorkloadSpec,
        device_name: str | None = None,
        *,
        host_budget: int | None = None,
        compile: CompileMode | None = None,
    ) -> None:
        refuse_many_processes()
        self._workload = {"spec": spec, "device": device_name, "host_budget": host_budget, "compile": compile}
        self._wanted = get_device(device_name).environment
        self.patience = PATIENCE_SECONDS
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as this
        self._child: Child | None = None
        self._environment: Environment | None = None
        self._starting = False
        self._closed = False
        self._deadline = math.inf
        self._spawn()

    @property
    def environment(self) -> Environment:
        """The worker's device and versions; they hold for all that replace it."""
        if self._environment is None:
            self._wake()
        assert self._environment is not None
        return self._environment

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """Limit all requests within the block to so many seconds together, whatever signs of life there are.

        When they are over the worker is ended and TimeLimitReached raised.
        """
        return patched(self, "_deadline", min(self._deadline, time.monotonic() + seconds))

    def release(self) -> None:
        """Release the device: end the worker. The next request starts a new one."""
        child, self._child, self._starting = self._child, None, False
        if child is not None:
            child.close()

    def close(self) -> None:
        """End the worker. May be called more than once."""
        self._closed = True
        self.release()
        self.log.close()

    @property
    def _waiting(self) -> float:
        """Seconds to wait for the next message."""
        return max(0.0, min(self.patience, self._deadline - time.monotonic()))

    def _spawn(self) -> None:
        """Start a worker and tell it what to build, without waiting for it."""
        try:
            self._child = Child.spawn(_MODULE, log=self.log, environment=child_environment(self._wanted))
        except OSError as error:
            raise MeasurementError(f"the worker process could not be started: {error}") from None
        self._starting = True
        with self._in_words():
            self._send("start", self._workload)

    def _wake(self) -> None:
        """Wait until there is a worker with the model built, starting one where there is none."""
        if self._closed:
            raise MeasurementError("this measurer is closed", remedy="Make a new one.")
        if self._child is None or (not self._starting and not self._child.alive):
            self.release()
            self._spawn()
        if not self._starting:
            return
        try:
            self._environment = self._await()
            self._starting = False
        except BaseException:
            self.release()
            raise

    def _ask(self, verb: str, **arguments: Any) -> Any:
        """Send a request and wait for the answer. A worker that the system kills counts as out of memory."""
        self._wake()
        try:
            with self._in_words():
                self._send(verb, arguments)
            return self._await()
        except AutockptError:
            raise
        except BaseException:  # Ctrl-C: the worker is busy with a request that is no longer wanted
            self.release()
            raise

    def _send(self, verb: str, arguments: Mapping[str, Any]) -> None:
        assert self._child is not None
        self._child.send((verb, arguments), self._waiting)

    def _await(self) -> Any:
        """Wait for the answer; each sign of life restarts the patience."""
        assert self._child is not None
        while True:
            with self._in_words():
                message = self._child.receive(self._waiting)
            if "error" in message:
                raise message["error"]
            if "result" in message:
                return message["result"]
            self.beat(message["beat"])

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Turn the death or silence of a worker into an AutockptError; the next request replaces it."""
        doing = "building the model" if self._starting else "running a plan"
        try:
            yield
        except ChildSilent:
            self.release()
            if time.monotonic() >= self._deadline:
                raise TimeLimitReached(f"the worker process was ended at the time limit while {doing}") from None
            raise MeasurementError(
                f"the worker process was silent for {self.patience:.4g} seconds while {doing} and was ended",
                remedy=f"Try a smaller batch or model. {self._printed()}",
            ) from None
        except ChildDied as death:
            self.release()
            if death.code == _SIGKILL:
                raise DeviceOutOfMemory(
                    f"the system killed the worker process while {doing}, most likely because memory ran out",
                    remedy="Close other programs, or try a smaller batch or budget.",
                ) from None
            raise MeasurementError(
                f"the worker process ended while {doing} ({how_it_ended(death.code or 0)})",
                remedy=f"Run the step by itself to see whether it ends a process there, too. {self._printed()}",
            ) from None

    def _printed(self) -> str:
        """The end of what the worker printed."""
        lines = last_lines(self.log)
        return f"The last it printed:\n{lines}" if lines else "It printed nothing."
