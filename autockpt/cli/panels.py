"""``--help`` in panels: a verb's options under a heading each, the same heading for the same option in every verb."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from autockpt.errors import plainly, without_passwords

# heading -> options by parameter name, in this order; what is in none stands under "Options"
PANELS = {
    "Training step": """model batch_size seq_len packed lengths batch_sizes seq_lens dtype autocast optimizer
        accumulate global_batch lora full qlora prepare_kbit load_in_4bit compile job seed""",
    "Device and budget": "budget headroom host_budget device hardware cards",
    "Search": "trials timeout space choices allow_inexact dry_run storage resume fresh again",
    "Output": "out plan_out page as_json help",
}


class PanelCommand(TyperCommand):
    """A verb whose help groups its options, and which says in plain words what a value has to be."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            said = plainly(error.message)
            if said:  # of what is missing click has the words
                error.message = f"{said}."
            raise
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
