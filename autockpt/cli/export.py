"""``autockpt export``: a plan as the nearest setting of another trainer."""

from __future__ import annotations

from pathlib import Path

from autockpt.cli import screen
from autockpt.cli.guard import guarded
from autockpt.cli.options import arg, flag, opt


@guarded
def export(
    plan: Path = arg("PLAN|RUN", "A plan file, or a run's directory.", default=...),
    *,
    to: str = opt("--to TRAINER", "transformers, trl, axolotl, torchtitan or megatron.", default=...),
    as_json: bool = flag("--json", "Print settings, losses and notes as JSON."),
) -> None:
    """Write the nearest setting of a trainer's own.

    For trainers that cannot apply a plan: their activation checkpointing set as near to the plan as it goes, without
    keeping more in memory where that can be avoided. What is lost is listed in comments. Redirect the output to a file.
    """
    from autockpt.integrations.export import export as nearest
    from autockpt.schema.runs import plan_at

    exported = nearest(plan_at(plan), to)
    if as_json:
        screen.print_json(exported.model_dump_json(indent=2))
    else:
        print(exported.settings, end="", flush=True)
