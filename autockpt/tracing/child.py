"""What runs inside the tracer's child process: requests in, raw graphs or errors out, until the parent goes away."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from autockpt.errors import AutockptError
from autockpt.tracing.assemble import Source
from autockpt.tracing.note import Note
from autockpt.tracing.run import GhostRun, RecordedRun, Run
from autockpt.workload.failures import summary

ALIVE, READY, DONE, FAILED = "alive", "ready", "done", "failed"
Request = tuple[str, dict[str, Any]]


def serve(connection: Connection, note: Note, source: Source, threads: int, prepare: Callable[[Run], None]) -> None:
    """Answer requests until the connection ends. Returns to its caller, which must end the process.

    ``source`` says whether steps are ghost-run or recorded, ``threads`` is the parent's number; ``prepare`` builds or
    takes the workload. Replies are (ALIVE,), then (READY, units, head, settings, notes, modules imported for it) or
    (FAILED, error class, message, remedy), and for each request (DONE, result) or (FAILED, ...).
    """
    known = set(sys.modules)
    _be_a_child()
    try:
        _check_autograd()
        connection.send((ALIVE,))
        run = _run(source, threads, note)
        if _answer(connection, lambda: _prepared(run, prepare, known)):
            while True:
                verb, arguments = connection.recv()
                _answer(connection, lambda v=verb, a=arguments: (DONE, getattr(run, v)(**a)))
    except (EOFError, OSError, KeyboardInterrupt):
        return


def main(socket: int, note: int, log: int) -> None:
    """Entry of a child that was started afresh: the first message is a pickled (source, threads, spec, device,
    capability)."""
    for stream in (1, 2):
        os.dup2(log, stream)
    connection = Connection(socket)
    with contextlib.suppress(EOFError, OSError):
        source, threads, spec, device, capability = pickle.loads(connection.recv_bytes())
        serve(connection, Note(note), source, threads, lambda run: run.build(spec, device, capability))
    os._exit(0)


def _run(source: Source, threads: int, note: Note) -> Run:
    if source == "recorded":
        return RecordedRun(torch.device("cpu"))
    return GhostRun(threads=threads, on_op=lambda operator: note.op(operator.note), on_enter=note.place)


def _be_a_child() -> None:
    """Quiet, single-threaded, without accelerators or core dumps, and deaf to Ctrl-C: the parent ends it."""
    faulthandler.disable()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    gc.freeze()  # what the parent left behind is not looked through at every collection
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115


def _check_autograd() -> None:
    """Backward must work here: it does not after a fork where the engine has threads for accelerators."""
    with torch.enable_grad():
        torch.ones(1, requires_grad=True).sum().backward()


def _prepared(run: Run, prepare: Callable[[Run], None], known: set[str]) -> tuple[Any, ...]:
    prepare(run)
    gc.collect()
    gc.freeze()  # what is there now stays: collections before each trace only look at what is new
    gc.disable()  # and there is one before each trace
    workload = run.workload
    imported = [name for name in sys.modules if name not in known]
    return READY, run.units, run.head, workload.settings, workload.notes, imported


def _answer(connection: Connection, work: Callable[[], tuple[Any, ...]]) -> bool:
    """Send the reply to one request; whether it is good news."""
    try:
        reply = work()
    except BaseException as error:
        connection.send((FAILED, *_described(error)))
        error.__traceback__ = error.__context__ = error.__cause__ = None
        gc.collect()
        return False
    connection.send(reply)
    return True


def _described(error: BaseException) -> tuple[str, str, str]:
    if isinstance(error, AutockptError):
        return type(error).__name__, error.message, error.remedy
    return "GhostError", f"the trace failed: {summary(error)}", "Record a real step instead."
