"""``autockpt export``: a plan as the nearest setting of another trainer."""

from __future__ import annotations

from pathlib import Path

from autockpt.cli import screen
from autockpt.cli.guard import guarded
from autockpt.cli.options import arg, flag, opt
from autockpt.errors import UsageError


@guarded
def export(
    plan: Path = arg("PLAN|RUN", "A plan file, or a run's directory.", default=...),
    *,
    to: str = opt("--to TRAINER", "transformers, trl, axolotl, torchtitan or megatron.", default=...),
    out: Path | None = opt("--settings-out FILE", "File to write, never over another. Default: print."),
    as_json: bool = flag("--json", "Print settings, losses and notes as JSON."),
) -> None:
    """Write the nearest setting of a trainer's own.

    For trainers that cannot apply a plan: their activation checkpointing set as near to the plan as it goes, without
    keeping more in memory where that can be avoided. What is lost is listed with it.
    """
    from autockpt.integrations.export import export as nearest
    from autockpt.schema.files import write_file
    from autockpt.schema.runs import plan_at

    exported = nearest(plan_at(plan), to)
    if out is not None:
        if out.exists():
            raise UsageError(
                f"{out} exists already", remedy="Give another --settings-out, or move that file away first."
            )
        write_file(out, exported.settings, UsageError)
    if as_json:
        screen.print_json(exported.model_dump_json(indent=2))
    elif out is None:
        print(exported.settings, end="", flush=True)
    else:
        console = screen.progress()
        console.print(f"Written to {out}: {'all' if exported.exact else 'not all'} of the plan")
        for loss in exported.losses:
            console.print(f"- {loss}")
