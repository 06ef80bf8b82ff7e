"""Random mixed plans: any choice on any unit, blocks or the attention and MLP inside them."""

import random
from collections.abc import Sequence

from torch import nn

from autockpt.schema.choices import ATTENTION, CHOICE_TYPES, SAVE, Choice, Remake, Segment, Selective, parse_choice
from autockpt.schema.graph import Unit
from autockpt.workload.units import module_of

_HEAVY = ("Linear", "Conv1D", "Conv1d", "Conv2d")
_MOST_KEPT = 4


def kinds() -> list[str]:
    """Choices that can be made for one block by itself, and that promise equal bits."""
    return [kind for kind, t in CHOICE_TYPES.items() if t.exact and "block" in t.roles]


def random_plan(model: nn.Module, units: Sequence[Unit], seed: int) -> dict[str, Choice]:
    """A choice for each unit in the given order, the same for the same seed; never ``save`` throughout.

    Every third block takes the choice of the block before it, so that choices that span several units find a second.
    """
    generator = random.Random(seed)
    segment = Segment(size=generator.randint(2, 4))
    inside: dict[str, list[Unit]] = {}
    for unit in units:
        if unit.parent is not None:
            inside.setdefault(unit.parent, []).append(unit)
    blocks = [unit for unit in units if unit.role == "block"]
    while True:
        drawn: dict[str, Choice] = {}
        before: Choice | None = None
        for block in blocks:
            parts = inside.get(block.name, [])
            if before is not None and not isinstance(before, Remake | Selective) and generator.random() < 1 / 3:
                drawn[block.name] = before
                continue
            for unit in parts if parts and generator.random() < 1 / 3 else [block]:
                drawn[unit.name] = before = _choice(module_of(model, unit.name), generator, segment)
        if not drawn or any(choice.kind != SAVE.kind for choice in drawn.values()):
            return {unit.name: drawn[unit.name] for unit in units if unit.name in drawn}


def _choice(module: nn.Module, generator: random.Random, segment: Segment) -> Choice:
    choice = parse_choice(generator.choice(kinds()))
    if isinstance(choice, Segment):
        return segment
    if not isinstance(choice, Remake | Selective) or generator.random() < 1 / 3:
        return choice
    if isinstance(choice, Remake) and generator.random() < 1 / 3:
        parts = [path for path, inner in module.named_modules() if path and not isinstance(inner, nn.ModuleList)]
        return choice.model_copy(update={"keep": ("**",), "within": tuple(generator.sample(parts, min(1, len(parts))))})
    heavy = [path for path, inner in module.named_modules() if path and type(inner).__name__ in _HEAVY]
    candidates = [*heavy, ATTENTION]
    keep = tuple(generator.sample(candidates, generator.randint(1, min(_MOST_KEPT, len(candidates)))))
    return choice.model_copy(update={"keep": tuple(sorted(keep))})
