"""The text of ``plan.yaml``: read with line numbers, written for people to read and edit."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import ValidationError

from autockpt.errors import PlanError
from autockpt.schema.choices import choice_kinds, dump_choice, parse_choice
from autockpt.schema.files import atomic_write, reason, set_aside
from autockpt.schema.names import parse_pattern
from autockpt.schema.plan import SCHEMA_VERSION, Plan
from autockpt.schema.sizes import format_bytes
from autockpt.schema.suggest import closest
from autockpt.schema.yaml import Document, parse, read

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    "source": "measured: real steps held the budget; simulated: predicted only",
    "hash": "of the choices that the numbers below belong to",
    "model": "the model this was made for",
    "workload": "the training step this was made for",
    "settings": "facts of that step",
    "environment": "the device it was measured on, or simulated for",
    "compile": "its steps are compiled: each layer by layer.compile(), or the whole model",
    "otherwise": "the same choices in steps that are compiled otherwise, or not at all",
    "predicted": "simulated: bytes by a ghost run of this very plan, seconds by op times",
    "measured": "by real training steps; noise is relative",
    "baselines": "what everybody would try first, for comparison",
}
_BYTES = re.compile(r"^(\s*(?:- )?(?:\w+_)?bytes: )([0-9]{4,})$", re.MULTILINE)


def read_plan(path: Path) -> Plan:
    """Read and validate a plan file. Raises PlanError with file, line and remedy."""
    document = read(path, PlanError)
    data = document.data
    if not isinstance(data, dict) or "autockpt" not in data:
        raise PlanError(
            f"{document.where()}: this is not a plan: it does not say `autockpt: {SCHEMA_VERSION}`",
            remedy=f"A plan has at least the line `autockpt: {SCHEMA_VERSION}` and a section `choices:`.",
        )
    _check_version(document, data["autockpt"])
    _check_choices(document, data.get("choices"))
    plan = document.validate(Plan)
    _check_units(document, plan.model.units)
    plan._document = document
    if plan.model.units:
        plan.expand_planned()  # so that patterns which clash or match nothing are refused here, with their line
    return plan


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


def _check_choices(document: Document, choices: object) -> None:
    if not isinstance(choices, dict) or not choices:
        remedy = "Write one line per unit, as in model.layers.0-11: save."
        raise document.complain(("choices",), "a plan needs choices", remedy)
    for pattern, value in choices.items():
        try:
            parse_pattern(pattern)
            parse_choice(value)
        except PlanError as error:
            near = closest(value, choice_kinds()) if isinstance(value, str) else None
            remedy = f"Did you mean {near}? {error.remedy}" if near else error.remedy
            raise document.complain(("choices", pattern), error.message, remedy) from None


def _check_units(document: Document, units: Mapping[str, str]) -> None:
    for pattern in units:
        try:
            list(parse_pattern(pattern).enumerate())
        except PlanError as error:
            raise document.complain(("model", "units", pattern), error.message, error.remedy) from None


def write_plan(plan: Plan, path: Path, existing: Literal["refuse", "set_aside", "replace"]) -> Path | None:
    """Write a plan file atomically; see Plan.save."""
    text = render(plan, path.name)
    try:
        aside = _make_room(plan, path, existing) if path.exists() else None
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text)
    except OSError as error:
        raise _unwritable(path, error) from None
    return aside


def _unwritable(path: Path, error: OSError) -> PlanError:
    return PlanError(f"the plan cannot be written to {path}: {reason(error)}", remedy="Give a path you can write to.")


def write_otherwise(plan: Plan, path: Path) -> None:
    """Put the section ``otherwise`` into a plan file; see Plan.save_otherwise."""
    there = read_plan(path)
    if there.model_copy(update={"otherwise": plan.otherwise}) != plan:
        raise PlanError(f"{path} is another plan by now", remedy="Verify it once more.")
    wanted = there.model_copy(update={"otherwise": {**there.otherwise, **plan.otherwise}})
    text = _with_otherwise(path.read_bytes().decode(), wanted)
    if not _says(text, path.name, wanted):  # laid out in a way of its own: written anew, and the file is kept aside
        wanted.save(path, existing="set_aside")
        return
    try:
        atomic_write(path, text)
    except OSError as error:
        raise _unwritable(path, error) from None


def _with_otherwise(text: str, plan: Plan) -> str:
    """A file's text with the section ``otherwise`` in the place of the one that it has, else behind ``measured``."""
    assert plan._document is not None
    places, lines = plan._document.lines, text.splitlines(keepends=True)
    data = plan.model_dump(mode="json", exclude_defaults=True, include={"otherwise"})
    section = _section("otherwise", data["otherwise"])
    old = [places[key,] for key in ("otherwise", "eager") if (key,) in places]
    for number in sorted(old or [places.get(("measured",), len(lines))], reverse=True):
        begin, end = number - 1, number
        while end < len(lines) and lines[end][0].isspace():
            end += 1
        while not lines[end - 1].strip():
            end -= 1
        if not old:
            begin = end
        elif begin > 0 and lines[begin - 1].startswith("# the same choices in steps"):
            begin -= 1
        lines[begin:end] = [section.lstrip() if old else section]
        section = ""
    return "".join(lines)


def _says(text: str, name: str, plan: Plan) -> bool:
    """Whether a file with this text would be read as this plan."""
    try:
        return parse(text, name, PlanError).validate(Plan) == plan
    except PlanError:
        return False


def _make_room(plan: Plan, path: Path, existing: str) -> Path | None:
    if existing == "replace" or _is_same(plan, path):
        return None
    if existing == "set_aside":
        return set_aside(path)
    raise PlanError(f"{path} exists and is another plan", remedy="Give another path, or move that file away.")


def _is_same(plan: Plan, path: Path) -> bool:
    try:
        return read_plan(path).model_dump() == plan.model_dump()
    except (PlanError, ValidationError):
        return False


def render(plan: Plan, name: str = "plan.yaml") -> str:
    """The file's text: a header that says how to load it, the choices, then where they are from, a paragraph each."""
    data: dict[str, Any] = plan.model_dump(mode="json", exclude_defaults=True, exclude={"choices", "autockpt"})
    if plan.workload is not None:
        data["workload"] = plan.workload.model_dump(mode="json", exclude_none=True)
    data["source"] = plan.source
    if not plan.hash:
        data.pop("hash", None)
    layers, head = (", ".join(choice_kinds(role)) for role in ("block", "head"))
    kinds = textwrap.fill(
        f"# Choices: {layers}; for the output head, by its name: {head}.", width=110, subsequent_indent="# "
    )
    sections = [_HEADER.format(name=name, kinds=kinds), f"autockpt: {plan.autockpt}\n"]
    sections += [_section("choices", {p: dump_choice(c) for p, c in plan.choices.items()}), "\n"]
    return "".join(sections) + "".join(_section(key, data[key]) for key in Plan.model_fields if key in data)


def _section(key: str, value: Any) -> str:
    """The text of one field, with what is to be said about it."""
    text, comment = _dump({key: value}), _COMMENTS.get(key)
    if isinstance(value, dict | list):
        text = "\n" + (f"# {comment}\n" if comment else "") + text
    elif comment:
        text = f"{text.rstrip()}  # {comment}\n"
    return _BYTES.sub(lambda m: f"{m[1]}{m[2]}  # {format_bytes(int(m[2]))}", text)


def _dump(data: object) -> str:
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110)
