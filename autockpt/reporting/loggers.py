"""Trials as they come in TensorBoard and Weights & Biases, by their own clients; both are optional."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autockpt.errors import UsageError
from autockpt.history.rundir import short_name
from autockpt.schema import Listener, Trial

KINDS = ("tensorboard", "wandb")
_MIB = 2**20
_READY = "ready"


def _client(kind: str, folder: Path, name: str, facts: dict[str, Any]) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """What writes a step's numbers with a client, and what closes it."""
    if kind == "wandb":
        folder.mkdir(parents=True, exist_ok=True)
        wandb: Any = importlib.import_module("wandb")
        run = wandb.init(project="autockpt", name=name, dir=str(folder), config=facts)
        return lambda step, numbers: run.log(numbers, step=step), run.finish
    tensorboard: Any = importlib.import_module("tensorboard.summary")
    writer = tensorboard.Writer(str(folder / "tensorboard" / name))

    def write(step: int, numbers: dict[str, float]) -> None:
        for tag, value in numbers.items():
            writer.add_scalar(tag, value, step=step)
        writer.flush()

    return write, writer.close


class _Process:
    """A client in a process of its own: a search forks, which their threads and connections do not outlive.

    Raises UsageError where the client cannot begin.
    """

    def __init__(self, kind: str, folder: Path, name: str, facts: dict[str, Any]) -> None:
        pipe = subprocess.PIPE
        self._child = subprocess.Popen([sys.executable, "-m", __name__], stdin=pipe, stdout=pipe, text=True)
        self._send([kind, str(folder), name, facts])
        assert self._child.stdout is not None
        if why := self._child.stdout.readline().strip().removeprefix(_READY):
            self.close()
            raise UsageError(
                f"{kind} cannot begin: {why}",
                remedy="For Weights & Biases without a login: WANDB_MODE=offline." if kind == "wandb" else None,
            )

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._send([step, numbers])

    def close(self) -> None:
        self._child.communicate()

    def _send(self, message: list[Any]) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(message) + "\n")
        self._child.stdin.flush()


def serve(lines: Iterator[str], answer: Callable[[str], None]) -> None:
    """What the process of a client does: begin, write each line's numbers, close at the end of them."""
    kind, folder, name, facts = json.loads(next(lines))
    try:
        write, close = _client(kind, Path(folder), name, facts)
    except Exception as error:
        answer(" ".join(f"{type(error).__name__}: {error}".split()))
        return
    answer(_READY)
    for line in lines:
        write(*json.loads(line))
    close()


class LoggingListener:
    """Passes everything on to ``inner`` and every trial's numbers to the sinks, one step each.

    Measured and simulated numbers have names of their own. A sink that fails is reported once and left alone: a search
    does not end because a log cannot be written.
    """

    def __init__(self, inner: Listener, sinks: dict[str, _Process]) -> None:
        self._inner, self._sinks, self._step = inner, sinks, 0

    def stage(self, name: str, total: int | None = None) -> None:
        self._inner.stage(name, total)

    def advance(self, steps: int = 1) -> None:
        self._inner.advance(steps)

    def note(self, text: str) -> None:
        self._inner.note(text)

    def trial(self, trial: Trial, best: Trial | None) -> None:
        self._inner.trial(trial, best)
        numbers = {**_numbers(trial, ""), **(_numbers(best, "best ") if best is not None else {})}
        self._each(lambda sink: sink.write(self._step, numbers))
        self._step += 1

    def close(self) -> None:
        """Finish all logs."""
        self._each(lambda sink: sink.close())

    def _each(self, action: Callable[[_Process], None]) -> None:
        for kind, sink in list(self._sinks.items()):
            try:
                action(sink)
            except Exception as error:
                del self._sinks[kind]
                self._inner.note(f"{kind} is not written to any more: {type(error).__name__}: {error}")


def _numbers(trial: Trial, prefix: str) -> dict[str, float]:
    """What is known of a trial, by name: ``measured/best step seconds``, ``simulated/peak MiB``, …"""
    out: dict[str, float] = {}
    for kind, known in (("measured", trial.measured), ("simulated", trial.predicted)):
        if known is not None:
            out[f"{kind}/{prefix}peak MiB"] = known.peak_bytes / _MIB
            if known.step_seconds:
                out[f"{kind}/{prefix}step seconds"] = known.step_seconds
    return out | ({} if prefix or trial.feasible is None else {"trial/fits": float(trial.feasible)})


@contextmanager
def logging_to(kinds: Sequence[str], inner: Listener, folder: Path, name: str, facts: dict[str, Any]) -> Iterator[Any]:
    """A listener that also logs, under ``folder``; ``inner`` itself where ``kinds`` is empty.

    ``name`` is the run's, ``facts`` its configuration. Raises UsageError for a kind that is not known, a package that
    is missing, and a client that cannot begin.
    """
    if not kinds:
        yield inner
        return
    sinks: dict[str, _Process] = {}
    listener = LoggingListener(inner, sinks)
    try:
        for kind in kinds:
            if kind not in KINDS:
                raise UsageError(f"--log-to {kind} is not known", remedy=f"Write {' or '.join(KINDS)}, or both.")
            if importlib.util.find_spec(kind) is None:
                raise UsageError(
                    f"--log-to {kind} needs the package {kind}, which is not installed",
                    remedy=f"Install it: pip install {kind}",
                )
            sinks[kind] = _Process(kind, folder, name, facts)
        yield listener
    finally:
        listener.close()


def run_name(model: str, budget: str) -> str:
    """``llama-1b-24GB-20261122-141503``: what a search is called in a log."""
    plain = re.sub(r"[^\w.%-]+", "_", f"{short_name(model)}-{budget}")
    return f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"


if __name__ == "__main__":  # stdout is the answer's alone: clients may print
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        serve(iter(sys.stdin), lambda text: print(text, file=answers, flush=True))
