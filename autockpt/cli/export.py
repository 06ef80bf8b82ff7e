"""``autockpt export``: a plan as the nearest setting of another trainer."""

from __future__ import annotations

from pathlib import Path

from autockpt.cli.guard import guarded, show
from autockpt.cli.options import arg, flag, opt
from autockpt.schema.run_directory import plan_at


@guarded
def export(
    plan: Path = arg("PLAN|RUN", "A plan file, or a run's directory.", default=...),
    *,
    to: str = opt("--to TRAINER", "transformers, trl, axolotl, torchtitan or megatron.", default=...),
    as_json: bool = flag("--json", "Print settings, losses and notes as JSON."),
) -> None:
    """Print the nearest setting of another trainer.

    For trainers that cannot apply a plan: prints the setting of their own activation checkpointing that is nearest to
    the plan, without keeping more in memory where that can be avoided. Comments list what is lost.
    """
    from autockpt.integrations.export import export as nearest

    show(nearest(plan_at(plan), to), lambda exported, _: print(exported.settings, end="", flush=True), as_json)
