"""The worker process: it holds one workload on one device and measures on request, until its connection ends.

Requests are ``{"verb", ...}``, ``start`` first, one at a time. Answers are ``{"result"}`` or ``{"error"}``;
``{"beat"}`` before an answer is a sign of life.
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
from pathlib import Path
from typing import Any

from autockpt.callstack import with_room
from autockpt.errors import AutockptError, MeasurementError
from autockpt.measuring.failures import device_lost, letting_go
from autockpt.schema.choices import parse_choices
from autockpt.schema.workload import WorkloadSpec

_PARENT_SECONDS = 2.0


class Worker:
    """Answers requests one after the other."""

    def __init__(self, answer: Callable[[dict[str, Any]], None]) -> None:
        self._answer = answer
        self._runner: Any = None

    def serve(self, request: dict[str, Any]) -> bool:
        """Answer one request. False where this process should end, because its device will not recover."""
        lost = False
        try:
            answer = {"result": getattr(self, f"do_{request['verb']}")(request)}
        except AutockptError as error:
            answer = {"error": error}
        except BaseException as error:  # whatever a user's code raises, SystemExit included
            traceback.print_exc()  # into the log
            answer, lost = {"error": _explained(error, request)}, device_lost(error)
        self._answer(answer)
        return not lost

    def do_start(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Build the workload; the environment that it is measured in."""

        from autockpt.devices import get_device, make_current
        from autockpt.measuring.compiled import Compiler
        from autockpt.measuring.environment import environment_of
        from autockpt.measuring.runner import StepRunner
        from autockpt.workload import build

        device = get_device(request["device"])
        self._beat("imported")
        # First of all: what others hold on the device can only be distinguished before this process opens its context.
        environment = environment_of(device)
        make_current(device)
        with letting_go(device, "building the model"):
            workload = build(WorkloadSpec.model_validate(request["spec"]), device.torch_device)
        self._beat("built")
        mode = request.get("compile")
        self._runner = StepRunner(
            workload,
            device,
            beat=self._beat,
            host_budget=request.get("host_budget"),
            compiler=Compiler(mode, device.kind, beat=self._beat) if mode else None,
        )
        return {"environment": environment.model_dump(mode="json")}

    def do_measure(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One plan's Measurement."""
        choices = parse_choices(request["choices"])
        measured = self._runner.measure(choices, steps=request["steps"], budget_bytes=request["budget_bytes"])
        return measured.model_dump(mode="json")

    def do_compare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Interleaved seconds of several plans."""
        plans = {name: parse_choices(choices) for name, choices in request["plans"].items()}
        return self._runner.compare(
            plans, rounds=request["rounds"], budget_bytes=request["budget_bytes"], warmup=request["warmup"]
        )

    def do_call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A function of autockpt, run on the runner."""
        return self._runner.call(request["ref"], request["payload"])

    def _beat(self, word: str) -> None:
        self._answer({"beat": word})


def main(descriptor: int) -> None:
    """Serve the connection until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to act on
    with suppress(OSError):  # where the system runs out of memory, it should end this and not the parent with results
        Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where a user's factory lies
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, os.getppid(), requests.put), daemon=True).start()
    worker = Worker(connection.send)

    def serve() -> None:
        while worker.serve(requests.get()):
            pass

    with_room(serve)
    # At once: tearing down a lost device can hang.
    os._exit(1)


def _listen(connection: Connection, parent: int, put: Callable[[dict[str, Any]], None]) -> None:
    """Hand on requests; when the connection ends or the parent is gone, end this process whatever it is doing."""
    with suppress(EOFError, OSError):
        while os.getppid() == parent:
            if connection.poll(_PARENT_SECONDS):
                put(connection.recv())
    os._exit(0)


def _explained(error: BaseException, request: Mapping[str, Any]) -> AutockptError:
    """What an exception means, for people: the user's fault, the device's, or ours."""
    from autockpt.workload import explain

    if device_lost(error):
        return MeasurementError(
            f"the device failed: {str(error).splitlines()[0]}",
            remedy="The next request starts a fresh process. If it repeats, run the step with CUDA_LAUNCH_BLOCKING=1.",
        )
    if request["verb"] == "call":
        return MeasurementError(
            f"{request['ref']} failed with {type(error).__name__}: {error}",
            remedy="The traceback is in the worker's log.",
        )
    return explain(error, "building the model and batch" if request["verb"] == "start" else "a step of the workload")
