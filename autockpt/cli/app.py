"""The program ``autockpt``: its verbs and nothing else."""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
from contextlib import suppress

import typer

from autockpt.callstack import with_room
from autockpt.cli.calibrate import calibrate
from autockpt.cli.diagnose import diagnose
from autockpt.cli.estimate import estimate
from autockpt.cli.explain import explain
from autockpt.cli.export import export
from autockpt.cli.history import history
from autockpt.cli.options import flag
from autockpt.cli.panels import PanelCommand
from autockpt.cli.search import search
from autockpt.cli.verify import verify

VERBS = (search, estimate, explain, diagnose, verify, history, export, calibrate)

COLLECT_AFTER = (100_000, 50)
"""Objects, and collections of the young, until the garbage collector looks again: what PyTorch and transformers make
while they are imported stays, and to look through it again and again takes a fifth of the time."""


def build() -> typer.Typer:
    """The typer application with all verbs."""
    app = typer.Typer(
        name="autockpt",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for verb in VERBS:
        app.command(cls=PanelCommand)(verb)
    return app


def main() -> None:
    """Entry point of the console script; ends the process with the verb's exit code."""
    gc.set_threshold(*COLLECT_AFTER)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that a terminal does not have must not cost the answer
            stream.reconfigure(errors="replace")
    code = 1

    def end_at_once() -> None:
        """Without taking all objects apart one by one, which takes seconds after many ghost runs."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)

    atexit.register(end_at_once)  # the first to be registered is the last to be called
    try:
        with_room(lambda: build()(prog_name="autockpt"))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        # the answer is given: a further signal could only break what libraries do when the interpreter ends
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _print_version(wanted: bool) -> None:
    if wanted:
        import autockpt

        print(f"autockpt {autockpt.__version__}")
        raise typer.Exit


def _root(
    version: bool = flag("--version", "Print the version and exit.", callback=_print_version, is_eager=True),
) -> None:
    """What should each layer do with its activations, so that training fits the memory budget and stays fast?

    Exit codes: 0 found, 2 wrong question, 3 nothing fits, 4 device or measurement failed, or a
    promise is broken, 130 interrupted, 141 the reader of the output went away (`| head`), 143 ended by SIGTERM.
    """
