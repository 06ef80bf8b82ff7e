"""The baselines: the usual plans, which every search tries first and compares its own with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, Choice, RecomputeOffload

NONE, ALL, EVERY_2, OFFLOAD_ALL, OURS = "none", "recompute all", "every-2", "offload all", "ours"
INPUTS_OFFLOADED = "inputs offloaded"
"""Every unit is recomputed from an input that waits off the device: `recompute_offload` everywhere."""
MEANINGS = {
    NONE: "saves everything",
    EVERY_2: "recompute on every second layer",
    INPUTS_OFFLOADED: "recompute from inputs kept on the host",
    OURS: "what this search found",
    "knobs": "the solver's plan for the n-th set of cost coefficients and margin (knobs) that Optuna proposed",
}
"""What plans do whose names do not say it; of ``knobs #3`` that of ``knobs``."""


def legend_of_names(names: Iterable[str]) -> list[str]:
    """What the names of plans mean, where they do not say it: a text for each."""
    parts = [name.partition(" #") for name in names]
    kinds = dict.fromkeys((kind, " #n" if numbered else "") for kind, numbered, _ in parts if kind in MEANINGS)
    return [f"{kind}{number}: {MEANINGS[kind]}" for kind, number in kinds]


def baseline_plans(units: Sequence[str], kinds: Sequence[str]) -> dict[str, dict[str, Choice]]:
    """Choices by unit for each baseline that the allowed ``kinds`` can express."""
    plans: dict[str, dict[str, Choice]] = {NONE: dict.fromkeys(units, SAVE)}
    if "recompute" in kinds:
        plans[ALL] = dict.fromkeys(units, RECOMPUTE)
        plans[EVERY_2] = {name: RECOMPUTE if i % 2 == 0 else SAVE for i, name in enumerate(units)}
    if "offload" in kinds:
        plans[OFFLOAD_ALL] = dict.fromkeys(units, OFFLOAD)
    if "recompute_offload" in kinds:
        plans[INPUTS_OFFLOADED] = dict.fromkeys(units, RecomputeOffload())
    return plans
