"""The items of the script: what runs in a process of its own, within how many seconds, for which part."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS = {
    1: "Runtime",
    2: "Offload",
    3: "Calibration",
    4: "Foresight",
    5: "The main job",
    6: "Long sequence, large batch",
}


@dataclass(frozen=True)
class Item:
    """``limit``: seconds after which the process is ended; ``least``: with fewer left it is not begun."""

    part: int
    name: str
    function: str
    limit: int
    least: int = 45
    subject: str = ""

    @property
    def slug(self) -> str:
        return f"{self.part}-{re.sub(r'[^a-z0-9]+', '-', self.name.lower()).strip('-')}"


@dataclass(frozen=True)
class Context:
    """What an item is given. ``keep`` is told what is known so far, so that running out of time loses little."""

    shapes: Any
    out: Path
    item: Item
    keep: Callable[[dict[str, Any]], None]

    @property
    def device(self) -> str:
        return self.shapes.device


# What is worth most where there are ten minutes once; then the rest, by these parts.
_FIRST = (
    *("1-kernels", "5-llama-1b-default-shape", "5-llama-1b-liger", "4-llama-1b", "2-overlap", "5-llama-8b-4-bits-lora"),
    *("1-host-cost", "1-captured", "3-rates", "5-searches-llama-1b", "1-contract", "1-bits", "2-stress", "6-video"),
)
_PARTS = (1, 2, 5, 4, 3, 6)


def items_of(shapes: Any) -> list[Item]:
    """All items, in the order in which they are worth having."""
    found = _all_of(shapes)
    first = {slug: place for place, slug in enumerate(_FIRST)}
    return sorted(found, key=lambda item: (first.get(item.slug, len(first)), _PARTS.index(item.part)))


def _all_of(shapes: Any) -> list[Item]:
    here = "tests.gpu"
    found = [
        Item(1, "kernels", f"{here}.runtime:kernels", 120),
        Item(1, "captured", f"{here}.runtime:captured", 120),
        Item(1, "bits", f"{here}.runtime:bits", 150),
        Item(1, "released", f"{here}.runtime:released", 150),
        Item(1, "host cost", f"{here}.runtime:host_cost", 150),
        Item(1, "contract", f"{here}.contract:contract", 480, 120),
        Item(2, "stress", f"{here}.offload:stress", 180),
        Item(2, "host budget", f"{here}.offload:host_budget", 90),
        Item(2, "disk tier", f"{here}.offload:disk_tier", 90),
        Item(2, "overlap", f"{here}.offload:overlap", 150),
        Item(3, "calibrate", f"{here}.foresight:calibrate", 240),
        Item(3, "rates", f"{here}.foresight:rates", 120),
    ]
    found += [Item(4, name, f"{here}.foresight:foresight", 200, 60, subject=name) for name in shapes.foresight]
    for name, task in shapes.tasks.items():
        rows = 150 * len(task.compiled) + 120 * task.losses
        limit = min(540, 150 + len(task.budgets) * (task.seconds + 90) + rows)
        found.append(Item(task.part, name, f"{here}.jobs:job", limit, min(150, limit), subject=name))
    for name, (_, budgets) in shapes.searches.items():
        found.append(Item(5, f"searches {name}", f"{here}.jobs:searches", 60 + 75 * len(budgets), 90, subject=name))
    return found


def path_of(out: Path, item: Item) -> Path:
    return out / f"{item.slug}.json"


def read(out: Path, item: Item) -> dict[str, Any]:
    """What is known of an item; empty where nothing is."""
    try:
        found = json.loads(path_of(out, item).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write(out: Path, item: Item, found: dict[str, Any]) -> None:
    """What is known of an item, whole or not at all: the process may be ended at any moment."""
    path = path_of(out, item)
    new = path.with_suffix(".part")
    new.write_text(json.dumps({"part": item.part, "item": item.name} | found, indent=1, default=str))
    os.replace(new, path)
