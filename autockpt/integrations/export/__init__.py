"""A plan as the nearest setting of a trainer that has activation checkpointing of its own, and what is lost.

A new trainer is one file, and one line in the table here.
"""

from __future__ import annotations

from collections.abc import Callable

from autockpt.errors import UsageError
from autockpt.integrations.export.axolotl import export_axolotl
from autockpt.integrations.export.megatron import export_megatron
from autockpt.integrations.export.torchtitan import export_torchtitan
from autockpt.integrations.export.transformers import export_transformers
from autockpt.integrations.export.wanted import Exported, LayerChoices, read
from autockpt.schema.plan import Plan
from autockpt.schema.suggest import did_you_mean

TARGETS: dict[str, Callable[[LayerChoices], Exported]] = {
    "transformers": export_transformers,
    "axolotl": export_axolotl,
    "torchtitan": export_torchtitan,
    "megatron": export_megatron,
}


def export(plan: Plan, target: str) -> Exported:
    """The plan as settings of ``target``, one of ``TARGETS``.

    No setting keeps more of a layer than the plan where the target can do without; what differs is said in words.
    Raises UsageError for an unknown target, PlanError for a plan that names no layers.
    """
    if target not in TARGETS:
        raise UsageError(
            f"{target!r} is no trainer that a plan can be exported to",
            remedy=f"{did_you_mean(target, TARGETS)}Known: {', '.join(TARGETS)}.",
        )
    return TARGETS[target](read(plan))
