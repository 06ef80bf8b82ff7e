"""The text of ``plan.yaml``, written for people to read and edit."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from autockpt.schema.choices import choice_kinds, legend, parse_choice
from autockpt.schema.sizes import format_bytes

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
