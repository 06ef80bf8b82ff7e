"""What a plan asks of each layer, read so that a coarser setting can be chosen for it and the difference named."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autockpt.errors import PlanError
from autockpt.schema import words
from autockpt.schema.base import Data
from autockpt.schema.known import known_plans
from autockpt.schema.names import listing, outermost, parse_pattern
from autockpt.schema.plan import Comparison, Plan
from autockpt.schema.sizes import format_binary

Losses = Mapping[str, str | None]
"""By kind of choice: what a setting does otherwise, in words; None where it does just that."""

AS_RECOMPUTE: Losses = {
    "recompute": None,
    "keep_attention": "attention is run again, whose output the plan keeps",
    "selective": "all of the layer is run again, of which the plan keeps a part",
    "remake": "all of the layer is run again, of which the plan recomputes only what is needed",
    "recompute_offload": "the layer's input stays on the device",
    "offload": "recomputed instead of moved off the device; its input stays",
}
"""What is lost of each choice where a layer is recomputed as a whole."""
_DONE = {"offload": "moved off the device"}
_KINDS = ("recompute", "offload", "recompute_offload")


class Exported(Data):
    """Settings for a trainer of its own kind, as the text of a file, and what of the plan is lost with them."""

    target: str
    settings: str
    losses: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the settings do to every layer what the plan does."""
        return not self.losses


@dataclass(frozen=True)
class LayerChoices:
    """A plan's choices, layer by layer.

    ``layers`` are the kinds of choice of all layers by name, in the model's order; a layer that saves and has another
    choice for a part of it counts as that: freeing more than the plan keeps its budget, freeing less breaks it.
    ``parts`` are choices on parts of layers, ``others`` those on anything else (a head, a loss). ``whole`` is False
    where the plan does not say how many layers there are, ``promises`` whether it has a peak and a step time, ``sets``
    how many sets of choices for smaller batches. ``baselines`` are the usual plans that its search compared it with.
    """

    layers: dict[str, str]
    parts: dict[str, str]
    others: dict[str, str]
    whole: bool = True
    promises: bool = False
    sets: int = 0
    baselines: tuple[Comparison, ...] = ()

    @property
    def freed(self) -> list[str]:
        """The layers that do not keep everything."""
        return [name for name, kind in self.layers.items() if kind != "save"]

    @property
    def to_free(self) -> list[str]:
        """The layers that a setting is to free at least: all, where the plan frees memory that is no layer's."""
        return list(self.layers) if self.others else self.freed

    def all_are(self, *kinds: str) -> bool:
        """Whether layers are freed, by these kinds of choice only, each as a whole."""
        return bool(self.freed) and not self.parts and {self.layers[name] for name in self.freed} <= set(kinds)

    def lost(self, picked: Collection[str], losses: Losses = AS_RECOMPUTE, done: str = "recomputed") -> list[str]:
        """What differs where a setting frees exactly the layers ``picked``, each as a whole; in words."""
        both = [n for n in self.freed if n in picked]
        found = self._misplaced(picked, done)
        for kind, names in _by_kind({n: self.layers[n] for n in both if not self._inside(n)}):
            if (what := losses.get(kind, f"{done}, for `{kind}` has no counterpart")) is not None:
                found.append(f"{listing(names)}: {what}")
        for kind, names in _by_kind({p: k for p, k in self.parts.items() if any(p.startswith(f"{n}.") for n in both)}):
            found.append(f"{listing(names)}: `{kind}` for a part of a layer, of which all is {done}")
        if picked and not self.whole:
            found.append(f"layers that the plan does not name may be {done}, too: it does not say which there are")
        return found + self.lost_others()

    def lost_others(self) -> list[str]:
        """Choices on what is no layer, and those for smaller batches, in words."""
        instead = "all layers are freed instead, which may not be enough"
        found = [f"{listing(n)}: `{kind}` is left out (more memory); {instead}" for kind, n in _by_kind(self.others)]
        if self.sets:
            found.append(f"{self.sets} more sets of choices, for smaller batches: these settings are for the largest")
        return found

    def figures(self, picked: Collection[str] | None, kind: str) -> str:
        """What the plan's search found about ``kind`` on the layers ``picked`` and nothing else; "" where it is none of
        the usual plans that were compared there."""
        does = {name: kind if name in (picked or ()) else "save" for name in self.layers}
        usual = known_plans(list(self.layers), _KINDS)
        names = {n for n, plan in usual.items() if {name: choice.kind for name, choice in plan.items()} == does}
        row = next((row for row in self.baselines if row.name in names), None)
        reading = (row.measured or row.predicted) if row is not None else None
        if row is None or reading is None or picked is None:
            return ""
        how = "measured" if row.measured is not None else "predicted"
        said = f"the plan's search {how} this setting (`{row.name}`): {words.step_of(reading)} a step"
        fits = "" if row.verdict != "over_budget" else ", over the plan's budget"
        return f"{said}, peak {format_binary(reading.peak_bytes)}{fits}"

    def _misplaced(self, picked: Collection[str], done: str) -> list[str]:
        more = [n for n in self.layers if n in picked and n not in self.freed]
        less = [n for n in self.freed if n not in picked]
        if more and less:
            extra = len(more) - len(less)
            cost = f"{extra} more, slower" if extra > 0 else f"{-extra} fewer, more memory"
            return [
                f"{listing(more)}: {done} in place of {listing(less)} ({cost if extra else 'alike layers, the same'})"
            ]
        if more:
            return [f"{listing(more)}: {done}, though the plan keeps what they save (slower)"]
        return [f"{listing(less)}: all is kept, though the plan frees them (more memory)"] if less else []

    def _inside(self, layer: str) -> bool:
        return any(part.startswith(f"{layer}.") for part in self.parts)


def read(plan: Plan) -> LayerChoices:
    """A plan's choices layer by layer.

    Raises PlanError where it names no layers, or by wildcards only and without the model's units.
    """
    known = list(plan.model.classes)
    head = plan.head
    names = known or [name for pattern in plan.choices if pattern != head for name in _enumerate(pattern)]
    chosen = {name: choice.kind for name, choice in plan.expand([n for n in names if n != head], head).items()}
    outer = outermost(chosen)
    layers = {n: chosen[n] for n in outer if n.rpartition(".")[2].isdigit()}
    parts = {n: k for n, k in chosen.items() if n not in outer and k != "save"}
    for part, kind in parts.items():
        owner = next(n for n in outer if part.startswith(f"{n}."))
        if layers.get(owner) == "save":
            layers[owner] = kind
    if not layers:
        raise PlanError(
            "the plan names no layers: nothing in it is a member of a list, as model.layers.0 is",
            remedy="Export a plan that autockpt search wrote, or name layers one by one or as ranges.",
        )
    others = {n: chosen[n] for n in outer if n not in layers and chosen[n] != "save"}
    promises, sets = plan.status != "unmeasured", len(plan.smaller_batches)
    return LayerChoices(layers, parts, others, bool(known), promises, sets, plan.baselines)


def _enumerate(pattern: str) -> list[str]:
    try:
        return list(parse_pattern(pattern).enumerate())
    except PlanError:
        raise PlanError(
            f"{pattern!r} names no layers by itself, and the plan does not say which units its model has",
            remedy="Write ranges (model.layers.0-11) for wildcards, or export a plan that autockpt search wrote.",
        ) from None


def _by_kind(choices: Mapping[str, str]) -> Iterable[tuple[str, list[str]]]:
    for kind in dict.fromkeys(choices.values()):
        yield kind, [name for name, k in choices.items() if k == kind]


def nearest_stride(wanted: LayerChoices, pick: Callable[[list[str], int], list[str]]) -> tuple[int, list[str]]:
    """Every how many layers to recompute one, and which these are: ``pick`` gives the layers for a stride.

    The stride that hits the very layers of the plan, else the largest that recomputes at least as many, so that no
    more stays in memory than planned where layers are alike.
    """
    names = list(wanted.layers)
    strides = {n: pick(names, n) for n in range(1, len(names) + 1)}
    exact = next((n for n, picked in strides.items() if picked == wanted.to_free), None)
    n = exact or max(n for n, picked in strides.items() if len(picked) >= len(wanted.to_free))
    return n, strides[n]


def document(
    target: str,
    lines: Iterable[str],
    wanted: LayerChoices,
    picked: Collection[str] | None,
    kind: str = "recompute",
    losses: Losses = AS_RECOMPUTE,
    notes: Sequence[str] = (),
    *,
    lost: Sequence[str] | None = None,
) -> Exported:
    """The settings with their losses, their figures where these are known, and notes, as comments in front.

    They give the layers ``picked`` the choice ``kind``; None where they go by parts of layers, and ``lost`` says what
    differs.
    """
    lost = wanted.lost(picked or (), losses, _DONE.get(kind, "recomputed")) if lost is None else lost
    if figures := wanted.figures(picked, kind):
        notes = [*notes, figures]
    elif lost and wanted.promises:
        notes = [*notes, "the plan's peak and step time were found for the plan, not for this setting"]
    head = [f"The nearest setting of {target} to an autockpt plan."]
    head += ["What is lost:", *(f"- {loss}" for loss in lost)] if lost else ["Nothing is lost."]
    head += [f"Note: {note}" for note in notes]
    text = "\n".join([*(f"# {line}" for line in head), *lines]) + "\n"
    return Exported(target=target, settings=text, losses=tuple(lost), notes=tuple(notes))
