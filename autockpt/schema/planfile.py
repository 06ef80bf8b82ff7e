"""The text of ``plan.yaml``: read with line numbers, written for people to read and edit."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from autockpt.errors import PlanError
from autockpt.schema.base import closest
from autockpt.schema.choices import choice_kinds, legend, parse_choice
from autockpt.schema.names import parse_pattern
from autockpt.schema.sizes import format_bytes
from autockpt.schema.yaml import Document, read

SCHEMA_VERSION = 1
_HEADER = """\
# What each unit of the model does with its activations, so that a training step stays within its memory budget.
#
#   import autockpt
#   handle = autockpt.apply(model, "{name}")  # handle.remove() undoes it
#   print(handle)  # what was attached, unit by unit
#
{kinds}
# Edit them as you like: names may be ranges (model.layers.0-11) or wildcards (* one component, ** any number).
# An edited plan counts as unmeasured until it is measured again.
"""
_COMMENTS = {
    "when": "the largest batch that the choices above were made for",
    "smaller_batches": "instead of the choices above, for batches of at most so many tokens; chosen at each forward",
    "source": "measured: these choices took real steps; simulated: predicted only",
    "hash": "of the choices that the numbers below belong to",
    "model": "the model this was made for",
    "workload": "the training step this was made for",
    "settings": "facts of that step",
    "environment": "the device it was measured on, or simulated for",
    "compile": "its steps are compiled: each layer by layer.compile(), or the whole model",
    "predicted": "simulated: bytes by a ghost run of this very plan, seconds by op times",
    "measured": "by real training steps; noise is relative",
    "baselines": "well-known plans, for comparison",
}
_BYTES = re.compile(r"^(\s*(?:- )?(?:\w+_)?bytes: )([0-9]{4,})$", re.MULTILINE)


def read_document(path: Path) -> Document:
    """A plan file's sections, its version and choices checked. Raises PlanError with file, line and remedy."""
    document = read(path, PlanError)
    data = document.data
    if not isinstance(data, dict) or "autockpt" not in data:
        raise PlanError(
            f"{document.where()}: this is not a plan: it does not say `autockpt: {SCHEMA_VERSION}`",
            remedy=f"A plan has at least the line `autockpt: {SCHEMA_VERSION}` and a section `choices:`.",
        )
    _check_version(document, data["autockpt"])
    if "choices" not in data and (near := closest("choices", map(str, data))):
        raise document.complain((near,), f"unknown key {near!r}", "Did you mean 'choices'?")
    _check_choices(document, ("choices",), data.get("choices"))
    smaller = data.get("smaller_batches")
    for number, each in enumerate(smaller if isinstance(smaller, list) else ()):
        if isinstance(each, dict):
            _check_choices(document, ("smaller_batches", number, "choices"), each.get("choices"))
    return document


def _check_version(document: Document, version: object) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise document.complain(
            ("autockpt",), f"{version!r} is no schema version", f"Write `autockpt: {SCHEMA_VERSION}`."
        )
    if version > SCHEMA_VERSION:
        raise document.complain(
            ("autockpt",),
            f"this plan has schema {version}, written by a newer autockpt; this one reads up to {SCHEMA_VERSION}",
            "Upgrade with `pip install -U autockpt`, or search again with this version.",
        )


def _check_choices(document: Document, place: tuple[str | int, ...], choices: object) -> None:
    if not isinstance(choices, dict) or not choices:
        remedy = "Write one line per unit, as in model.layers.0-11: save."
        raise document.complain(place, "a plan needs choices", remedy)
    for pattern, value in choices.items():
        try:
            parse_pattern(pattern)
            parse_choice(value)
        except PlanError as error:
            raise document.complain((*place, pattern), error.message, error.remedy) from None


def check_units(document: Document, units: Mapping[str, str]) -> None:
    """Raise PlanError, with its line, for a pattern of unit names that is none."""
    for pattern in units:
        try:
            list(parse_pattern(pattern).enumerate())
        except PlanError as error:
            raise document.complain(("model", "units", pattern), error.message, error.remedy) from None


def render(sections: Mapping[str, Any], name: str = "plan.yaml") -> str:
    """The file's text: a header that says how to load it, then the sections in their order, a paragraph each."""
    layers, head = (", ".join(choice_kinds(role)) for role in ("block", "head"))
    kinds = textwrap.fill(
        f"# Choices: {layers}; for the output head, by its name: {head}.", width=110, subsequent_indent="# "
    )
    rest = dict(sections)
    text = [_HEADER.format(name=name, kinds=kinds), f"autockpt: {rest.pop('autockpt')}\n"]
    choices = rest.pop("choices")
    every = [*choices.values(), *(c for each in rest.get("smaller_batches", ()) for c in each["choices"].values())]
    text.append(_section("choices", choices, legend(map(parse_choice, every))))
    text += [_section(key, rest.pop(key)) for key in ("when", "share", "smaller_batches") if key in rest]
    text.append("\n")
    return "".join(text) + "".join(_section(key, value) for key, value in rest.items())


class _OfChoices(yaml.SafeDumper):
    """Writes a choice with options in braces, as people do, not a line for each option."""

    def represent_choice(self, data: dict[str, Any]) -> yaml.MappingNode:
        return self.represent_mapping("tag:yaml.org,2002:map", data, flow_style="kind" in data)


_OfChoices.add_representer(dict, _OfChoices.represent_choice)


def _section(key: str, value: Any, comments: Sequence[str] = ()) -> str:
    """The text of one field, with what is to be said about it."""
    # in braces lines are broken only behind what is over the width
    dumper, width = (_OfChoices, 80) if key in ("choices", "smaller_batches") else (yaml.SafeDumper, 110)
    text = yaml.dump({key: value}, Dumper=dumper, sort_keys=False, allow_unicode=True, width=width)
    comment = _COMMENTS.get(key)
    if isinstance(value, dict | list):
        comments = [*([comment] if comment else []), *comments]
        above = [textwrap.fill(line, 110, initial_indent="# ", subsequent_indent="#   ") for line in comments]
        text = "\n" + "".join(f"{line}\n" for line in above) + text
    elif comment:
        text = f"{text.rstrip()}  # {comment}\n"
    return _BYTES.sub(lambda m: f"{m[1]}{m[2]}  # {format_bytes(int(m[2]))}", text)
