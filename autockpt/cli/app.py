"""The program ``autockpt``: its verbs, the groups of their options, and the process's end."""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperCommand

from autockpt.cli.calibrate import calibrate
from autockpt.cli.diagnose import diagnose
from autockpt.cli.estimate import estimate
from autockpt.cli.explain import explain
from autockpt.cli.export import export
from autockpt.cli.guard import TERMINATED, UNREAD, silence_output
from autockpt.cli.history import history
from autockpt.cli.options import flag
from autockpt.cli.search import search
from autockpt.cli.verify import verify
from autockpt.errors import without_passwords
from autockpt.interpreter import with_room
from autockpt.process import launched, own_rank

VERBS = (search, estimate, explain, diagnose, verify, history, export, calibrate)

COLLECT_AFTER = (100_000, 50)
"""Thresholds of the garbage collector. With Python's defaults it takes a fifth of the time, as it visits the objects of
PyTorch and transformers again and again while they are imported."""

# heading -> options by parameter name, in this order; all others are under "Options"
PANELS = {
    "Training step": """model batch_size seq_len packed lengths batch_sizes seq_lens dtype autocast optimizer
        accumulate global_batch lora full qlora load_in_4bit compile job seed""",
    "Device and budget": "budget headroom host_budget device hardware gpus_per_host cards",
    "Search": "trials timeout choices allow_inexact storage resume fresh no_wait",
    "Output": "out plan_out page as_json help",
}


class PanelCommand(TyperCommand):
    """A verb whose help groups its options, and whose errors about them show no passwords."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            stray: Any = error  # click's usage errors repeat the words of the command line
            stray.message = without_passwords(getattr(error, "message", ""))
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:  # click's, which typer has under two names
        heading = {name: title for title, names in PANELS.items() for name in names.split()}
        panels: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", "Options", *PANELS)}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                plain = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels[heading.get(parameter.name or "", plain)].append(record)
        for title, records in panels.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


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
        if isinstance(stream, io.TextIOWrapper):  # a terminal may lack a character
            stream.reconfigure(errors="replace")
    code = 1

    def end_at_once() -> None:
        """Skip the destruction of all objects, which takes seconds after many ghost runs."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)

    in_a_job = launched() > 1 and sys.argv[1:2] == ["search"]
    if in_a_job and own_rank():  # the first rank prints what all of them have found
        silence_output()
    atexit.register(end_at_once)  # the first to be registered is the last to be called
    try:
        with_room(lambda: build()(prog_name="autockpt"))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        code = UNREAD if isinstance(end.__context__, BrokenPipeError) else code  # typer's is 1, of --help
        raise
    finally:
        if in_a_job and code != TERMINATED:
            from autockpt.measuring.ranks import leave_together

            leave_together()
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

    Exit codes: 0 success, 2 invalid input, 3 no plan fits, 4 device or measurement failed or `verify` found a
    deviation, 130 interrupted, 141 output pipe closed, 143 ended by SIGTERM.
    """
