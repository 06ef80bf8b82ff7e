"""Names of units, and the patterns that stand for many of them in a plan.

A pattern is a dotted name whose components may be a literal (``mlp``), a range of indices (``0-11``), ``*`` (any one
component) or ``**`` (any number of components, none included). ``model.layers.0-11`` names twelve units. A pattern that
is itself the name of a unit means that unit alone; one with ``**`` means the outermost units that it matches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any, Generic, NamedTuple, TypeVar

from autockpt.errors import PlanError
from autockpt.schema.base import did_you_mean
from autockpt.schema.choices import Choice

T = TypeVar("T")
_RANGE = re.compile(r"([0-9]+)-([0-9]+)")
_INDEX = re.compile(r"0|[1-9][0-9]*")
_MOST_NAMES = 100_000
# torch.compile, FSDP1 and torch's own activation-checkpoint wrapper put a component of their own at any depth
WRAPPED_ANYWHERE = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# DDP, PEFT, Lightning's strategies and Opacus stand in front
_WRAPPED_IN_FRONT = (("module",), ("base_model", "model"), ("_forward_module",), ("_module",))
_PROMPTED = "base_model."


class Entry(NamedTuple, Generic[T]):
    """One line of a plan: a pattern, what it says, and where it stands (``plan.yaml:14``) for error messages."""

    pattern: str
    value: T
    where: str = ""

    def located(self, message: str) -> str:
        return f"{self.where}: {message}" if self.where else message


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern. ``parts`` are literals, ``*``, ``**`` or ranges of indices."""

    text: str
    parts: tuple[str | range, ...]

    def enumerate(self) -> list[str]:
        """All names that a pattern without wildcards stands for. Raises PlanError for wildcards and endless ranges."""
        if any(part in ("*", "**") for part in self.parts):
            raise PlanError(f"{self.text!r} stands for no definite names", remedy="Write names and ranges only.")
        # counted before anything is made: a range may be endless for all practical purposes
        if math.prod(p.stop - p.start for p in self.parts if isinstance(p, range)) > _MOST_NAMES:
            raise PlanError(f"{self.text!r} names too many units", remedy=f"At most {_MOST_NAMES} can be named.")
        options = [part if isinstance(part, range) else [part] for part in self.parts]
        return [".".join(map(str, parts)) for parts in product(*options)]

    def select(self, names: Collection[str]) -> list[str]:
        """The names that the pattern stands for, in their order; an exact name stands for itself alone."""
        if self.text in names:
            return [self.text]
        found = [n for n in names if _match(self.parts, tuple(n.split(".")))]
        return outermost(found) if "**" in self.parts else found


def parse_pattern(text: str) -> Pattern:
    """Parse one pattern. Raises PlanError for empty components, reversed ranges and partial wildcards."""
    parts: list[str | range] = []
    for component in text.split("."):
        span = _RANGE.fullmatch(component)
        if not component or component != component.strip():
            raise PlanError(f"{text!r} is not a unit name", remedy="Write dotted names such as model.layers.0-11.")
        if span is not None:
            if not (_INDEX.fullmatch(span[1]) and _INDEX.fullmatch(span[2]) and int(span[1]) <= int(span[2])):
                raise PlanError(
                    f"{component!r} in {text!r} is not a range", remedy="Write the smaller index first, as in 0-11."
                )
            parts.append(range(int(span[1]), int(span[2]) + 1))
        elif "*" in component and component not in ("*", "**"):
            raise PlanError(
                f"{component!r} in {text!r} mixes a wildcard with letters",
                remedy="* stands for one whole component, ** for any number of them, 0-11 for a range of indices.",
            )
        else:
            parts.append(component)
    return Pattern(text, tuple(parts))


def _match(parts: Sequence[str | range], components: tuple[str, ...]) -> bool:
    """Match by dynamic programming over components: linear in parts × components, whatever the wildcards."""
    reach = [True] + [False] * len(components)
    for part in parts:
        if part == "**":
            for i in range(1, len(reach)):
                reach[i] = reach[i] or reach[i - 1]
            continue
        fits = [part == "*" or (_within(c, part) if isinstance(part, range) else c == part) for c in components]
        reach = [False] + [reach[i] and fits[i] for i in range(len(components))]
    return reach[-1]


def _within(component: str, indices: range) -> bool:
    return _INDEX.fullmatch(component) is not None and int(component) in indices


def expand(entries: Iterable[Entry[T]], names: Iterable[str], more: Sequence[str] = ()) -> dict[str, Entry[T]]:
    """Which entry speaks for which name, in the order of ``names``; names that no entry speaks for are left out.

    Raises PlanError where a pattern is malformed or matches nothing, a range reaches past what exists, or two entries
    name one unit. ``more`` are names that a hint may offer besides, for which these patterns do not stand.
    """
    known = dict.fromkeys(names)
    owner: dict[str, Entry[T]] = {}
    for entry in entries:
        for name in _selected(entry, known, more):
            if name in owner:
                raise PlanError(
                    entry.located(f"{name} is named twice: by {_source(owner[name])} and by {_source(entry)}"),
                    remedy="Leave one of the two, or narrow a pattern.",
                )
            owner[name] = entry
    return {name: owner[name] for name in known if name in owner}


def _selected(entry: Entry[Any], names: Collection[str], more: Sequence[str]) -> list[str]:
    try:
        whole = entry.pattern in names
        pattern = Pattern(entry.pattern, ()) if whole else parse_pattern(strip_prefixes(entry.pattern) or entry.pattern)
    except PlanError as error:
        raise PlanError(entry.located(error.message), remedy=error.remedy) from None
    found = pattern.select(names)
    if not found:
        names = [*names, *more]
        raise PlanError(
            entry.located(f"{entry.pattern!r} matches no unit of this model"),
            remedy=f"{did_you_mean(entry.pattern, fold(dict.fromkeys(names, '')))}Units here: {listing(names)}.",
        )
    for position, part in enumerate(pattern.parts):
        if isinstance(part, range):
            # behind ** a position is not known, so an index counts wherever it stands
            behind = slice(None) if "**" in pattern.parts[:position] else slice(position, position + 1)
            seen = {int(c) for n in found for c in n.split(".")[behind] if _within(c, part)}
            if len(seen) < part.stop - part.start:
                missing = next(i for i in part if i not in seen)
                raise PlanError(
                    entry.located(f"{entry.pattern!r} names index {missing}, which this model does not have"),
                    remedy=f"Units here: {listing(names)}.",
                )
    return found


def _source(entry: Entry[Any]) -> str:
    return f"{entry.pattern!r} ({entry.where})" if entry.where else repr(entry.pattern)


def fold(assignment: Mapping[str, T]) -> dict[str, T]:
    """The shortest list of exact names and ranges that says the same: ``model.layers.0-11: save``.

    ``expand`` over the same names gives the assignment back. Values are compared by equality.
    """
    names = [tuple(name.split(".")) for name in assignment]
    # names that look like ranges or wildcards cannot be folded; they are so rare that nothing is then
    if any("*" in c or _RANGE.fullmatch(c) for parts in names for c in parts):
        return dict(assignment)
    items = [(parts, value, i) for i, (parts, value) in enumerate(zip(names, assignment.values(), strict=True))]
    depth = max((len(parts) for parts, _, _ in items), default=0)
    for position in reversed(range(depth)):
        items = _fold_at(items, position)
    return {".".join(parts): value for parts, value, _ in sorted(items, key=lambda item: item[2])}


def folded(assignment: Mapping[str, T]) -> list[tuple[str, list[str], T]]:
    """The same with the names that each pattern stands for."""
    return [
        (pattern, [pattern] if pattern in assignment else parse_pattern(pattern).enumerate(), value)
        for pattern, value in fold(assignment).items()
    ]


def _fold_at(items: list[tuple[tuple[str, ...], T, int]], position: int) -> list[tuple[tuple[str, ...], T, int]]:
    """Join items that differ in one index and follow one another there."""
    result: list[tuple[tuple[str, ...], T, int]] = []
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[tuple[int, T, int]]] = {}
    for parts, value, order in items:
        if position < len(parts) and _INDEX.fullmatch(parts[position]):
            key = (parts[:position], parts[position + 1 :])
            groups.setdefault(key, []).append((int(parts[position]), value, order))
        else:
            result.append((parts, value, order))
    for (before, after), members in groups.items():
        members.sort(key=lambda member: member[0])
        runs = groupby(enumerate(members), key=lambda item: (item[1][0] - item[0], item[1][1]))
        for (_, value), run in runs:
            indices, _, orders = zip(*(member for _, member in run), strict=True)
            index = str(indices[0]) if len(indices) == 1 else f"{indices[0]}-{indices[-1]}"
            result.append(((*before, index, *after), value, min(orders)))
    return result


def outermost(names: Iterable[str]) -> list[str]:
    """The names that lie inside no other of them, in their order."""
    names = list(names)
    present = set(names)
    return [n for n in names if not any(a in present for a in ancestors(n))]


def ancestors(name: str) -> list[str]:
    """The names of the modules around a module, innermost first: ``a.b.c`` lies in ``a.b`` and ``a``."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]


def check_nesting(owner: Mapping[str, Entry[Choice]] | Mapping[str, Choice]) -> None:
    """Refuse a choice on a unit together with one on its sub-unit, unless the outer one is ``save``.

    Takes what ``expand`` returned, or choices by exact name. Raises PlanError naming both lines.
    """
    entries = {name: said if isinstance(said, Entry) else Entry(name, said) for name, said in owner.items()}
    for name, inner in entries.items():
        for around in ancestors(name):
            outer = entries.get(around)
            if outer is None or outer.value.kind == "save":
                continue
            message = (
                f"{_source(inner)} makes a choice inside {around}, which {_source(outer)} already sets to {outer.value}"
            )
            raise PlanError(inner.located(message), remedy=f"Set {around} to save, or leave the choice on {name} out.")


def strip_prefixes(name: str) -> str:
    """A module's name without what known wrappers put into it: compile, DDP, FSDP, PEFT.

    ``base_model.model.model.layers.0`` and ``module._orig_mod.model.layers.0`` are both ``model.layers.0``; a wrapped
    root itself is the empty name.
    """
    parts = tuple(p for p in name.split(".") if p not in WRAPPED_ANYWHERE)
    while front := next((f for f in _WRAPPED_IN_FRONT if parts[: len(f)] == f), None):
        parts = parts[len(front) :]
    return ".".join(parts)


def views(names: Iterable[str]) -> list[dict[str, str]]:
    """The ways in which a model's unit names may be meant, best first; each maps the meant name to the real one.

    First with wrapper prefixes stripped; then, for a model held as ``self.model`` (Lightning), with that component
    taken off or put in front; last as names in the model that PEFT's prompt tuning holds as ``base_model``, with no
    ``model`` between.
    """
    real = list(names)
    stripped = {strip_prefixes(n): n for n in real}
    result = [stripped]
    if stripped and all(n.startswith("model.") for n in stripped):
        result.append({n.removeprefix("model."): r for n, r in stripped.items()})
    result.append({f"model.{n}": r for n, r in stripped.items()})
    if any(n.startswith(_PROMPTED) for n in stripped):
        result.append(
            {n.removeprefix(_PROMPTED) if n.startswith(_PROMPTED) else f"model.{n}": r for n, r in stripped.items()}
        )
    return result


def align(wanted: Collection[str], names: Iterable[str]) -> dict[str, str]:
    """The first view of a model's names in which every wanted pattern matches something, else the plain one."""
    options = views(names)
    for view in options:
        if all(p in view or parse_pattern(p).select(view) for p in wanted):
            return view
    return options[0]


def listing(names: Iterable[str], limit: int = 6) -> str:
    """Unit names folded and shortened for one line of an error message."""
    folded = list(fold(dict.fromkeys(names, "")))
    return ", ".join(folded[:limit]) + (f", … ({len(folded) - limit} more)" if len(folded) > limit else "")
