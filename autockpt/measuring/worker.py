"""The worker process of ``client.py``: it builds one workload on one device and measures it on request.

Requests are (verb, arguments), one at a time: ``start`` first, then what a ``StepRunner`` does. Answers are
``{"result"}`` or ``{"error"}``; ``{"beat"}`` before an answer is a sign of life.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from autockpt.errors import AutockptError, MeasurementError
from autockpt.interpreter import with_room
from autockpt.measuring.failures import device_lost, releasing_memory
from autockpt.process import be_killed_first
from autockpt.schema.plan import CompileMode
from autockpt.schema.workload import WorkloadSpec

_PARENT_SECONDS = 2.0


class Worker:
    """Answers requests one after the other."""

    def __init__(self, answer: Callable[[dict[str, Any]], None]) -> None:
        self._answer = answer
        self._runner: Any = None

    def serve(self, verb: str, arguments: Mapping[str, Any]) -> bool:
        """Answer one request. False where this process should end, because its device will not recover."""
        lost = False
        try:
            answer = {"result": getattr(self._runner, verb)(**arguments) if self._runner else self._start(**arguments)}
        except AutockptError as error:
            answer = {"error": error}
        except BaseException as error:  # whatever a user's code raises, SystemExit included
            traceback.print_exc()  # into the log
            answer, lost = {"error": _explained(error, verb, arguments)}, device_lost(error)
        self._answer(answer)
        return not lost

    def _start(
        self, spec: WorkloadSpec, device: str | None, host_budget: int | None, compile: CompileMode | None
    ) -> Any:
        """Build the workload; the environment that it is measured in."""

        from autockpt.devices import get_device, make_current
        from autockpt.measuring.compiler import Compiler
        from autockpt.measuring.environment import environment_of
        from autockpt.measuring.runner import StepRunner
        from autockpt.workload import build

        there = get_device(device)
        self._beat("imported")
        environment = environment_of(there)
        make_current(there)
        with releasing_memory(there, "building the model"):
            workload = build(spec, there.torch_device)
        self._beat("built")
        compiler = Compiler(compile, there.kind, beat=self._beat) if compile else None
        self._runner = StepRunner(workload, there, beat=self._beat, host_budget=host_budget, compiler=compiler)
        return environment

    def _beat(self, word: str) -> None:
        self._answer({"beat": word})


def main(descriptor: int) -> None:
    """Serve the connection until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to act on
    be_killed_first()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where a user's factory lies
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    requests: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, os.getppid(), requests.put), daemon=True).start()
    worker = Worker(connection.send)

    def serve() -> None:
        while worker.serve(*requests.get()):
            pass

    with_room(serve)
    # At once: tearing down a lost device can hang.
    os._exit(1)


def _listen(connection: Connection, parent: int, put: Callable[[Any], None]) -> None:
    """Hand on requests; when the connection ends or the parent is gone, end this process whatever it is doing."""
    with suppress(EOFError, OSError):
        while os.getppid() == parent:
            if connection.poll(_PARENT_SECONDS):
                put(connection.recv())
    os._exit(0)


def _explained(error: BaseException, verb: str, arguments: Mapping[str, Any]) -> AutockptError:
    """What an exception means, for people: the user's fault, the device's, or ours."""
    from autockpt.workload import workload_error

    if device_lost(error):
        return MeasurementError(
            f"the device failed: {str(error).splitlines()[0]}",
            remedy="The next request starts a fresh process. If it repeats, run the step with CUDA_LAUNCH_BLOCKING=1.",
        )
    if verb == "call":
        return MeasurementError(
            f"{arguments['ref']} failed with {type(error).__name__}: {error}",
            remedy="The traceback is in the worker's log.",
        )
    return workload_error(error, "building the model and batch" if verb == "start" else "a step of the workload")
