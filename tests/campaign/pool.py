"""Trials in a forked child that is replaced when it dies or hangs; what it was at is then the verdict."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

import torch

from autockpt.schema.choices import Choice
from tests.campaign.program import Program, draw, source
from tests.campaign.trial import PLANS, Trials, Verdict, observe, plan, quiet_threads

SECONDS = 60.0
"""A pair that takes longer hangs."""
_PER_CHILD = 4000


def run_all(numbers: Sequence[int]) -> Iterator[Verdict]:
    """The verdicts of pairs in order, each as soon as it is there."""
    at = 0
    gc.collect()
    gc.freeze()
    while at < len(numbers):
        pid, pipe = _fork(partial(_some, numbers[at : at + _PER_CHILD]))
        end = min(len(numbers), at + _PER_CHILD)
        try:
            for verdict in _verdicts(pipe):
                yield verdict
                at += 1
        finally:
            word, status = _ended(pid, pipe)
        if at < end:
            yield _lost(numbers[at], draw(numbers[at] // PLANS), word, status)
            at += 1


def _ended(pid: int, pipe: int) -> tuple[str, int]:
    """CRASH and the status of a child that ends by itself, in a second at most; HANG where it must be killed."""
    os.close(pipe)
    for _ in range(100):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return "CRASH", status
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return "HANG", os.waitpid(pid, 0)[1]


def _verdicts(pipe: int) -> Iterator[Verdict]:
    """What the child says, until it ends or is silent for too long."""
    data = b""
    while select.select([pipe], [], [], SECONDS)[0]:
        new = os.read(pipe, 1 << 16)
        if not new:
            return
        *lines, data = (data + new).split(b"\n")
        yield from (Verdict(**json.loads(line)) for line in lines)


def _lost(number: int, program: Program, word: str, status: int) -> Verdict:
    """The verdict of a pair whose process is gone: invalid where plain training alone dies, too."""
    how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.waitstatus_to_exitcode(status)}"
    if word == "CRASH":
        pid, pipe = _fork(lambda _: observe(source(program), None))
        next(_verdicts(pipe), None)  # it says nothing
        if _ended(pid, pipe) == ("CRASH", status):
            word = "invalid"
    return Verdict(number, word, program.families, plan(program, number)[0], program.ordinary, how)


def in_child(number: int, program: Program, choices: dict[str, Choice]) -> Verdict:
    """The verdict of a pair that is given, from a process of its own."""
    pid, pipe = _fork(lambda out: _say(out, Trials().run(number, program, choices)))
    verdict = next(_verdicts(pipe), None)
    ended = _ended(pid, pipe)
    return verdict or _lost(number, program, *ended)


def _fork(work: Callable[[int], object]) -> tuple[int, int]:
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.close(reading)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        torch.set_num_threads(1)
        quiet_threads()
        work(writing)
        code = 0
    except BaseException:
        with contextlib.suppress(Exception):
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            sys.stderr.flush()
    os._exit(code)


def _some(numbers: Sequence[int], pipe: int) -> None:
    trials = Trials()
    for number in numbers:
        _say(pipe, trials.run(number))


def _say(pipe: int, verdict: Verdict) -> None:
    os.write(pipe, json.dumps(asdict(verdict)).encode() + b"\n")
