"""Choices that the device itself refuses, which only real steps tell: see ``policies.watched_backends``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from autockpt.errors import ConflictError, DeviceOutOfMemory
from autockpt.policies.watched_backends import KNOWN, WATCHING
from autockpt.schema.choices import SAVE, Choice, dump_choices, parse_choice, parse_choices

if TYPE_CHECKING:
    from autockpt.measuring import Measurer, StepRunner


def run_once(runner: StepRunner, payload: Mapping[str, Any]) -> dict[str, Any]:
    """One cycle with ``payload["choices"]``: what refused it, or an empty text. Runs where the model lives."""
    try:
        with runner.attached(parse_choices(payload["choices"])):
            runner.run_cycle()
    except ConflictError as error:
        return {"refused": error.message}
    return {"refused": ""}


def refused_choices(measurer: Measurer, plain: Mapping[str, Choice], kinds: Iterable[str]) -> dict[str, str]:
    """Those of ``kinds`` that a step on the device refuses, and why. ``plain``: the plan in which blocks save.

    Steps run only where nobody knows the device's backend yet. What does not fit there counts as not refused: whatever
    fits will say so itself.
    """
    said: dict[str, str] = {}
    if measurer.environment.device.kind in KNOWN:
        return said
    for kind in (kind for kind in kinds if kind in WATCHING):
        choices = {name: parse_choice(kind) if choice == SAVE else choice for name, choice in plain.items()}
        payload = {"choices": dump_choices(choices)}
        with suppress(DeviceOutOfMemory):
            said[kind] = measurer.call("autockpt.profiling.refusals:run_once", payload)["refused"]
    return {kind: why for kind, why in said.items() if why}
