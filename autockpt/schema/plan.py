"""The plan: a choice for each unit, with its provenance and its measurements or predictions.

``Plan.load`` and ``Plan.save`` read and write the YAML file, which people may edit.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, Field, PrivateAttr, ValidationError, model_validator

from autockpt.errors import PlanError
from autockpt.schema import words
from autockpt.schema.base import Data, Facts, refused, validating
from autockpt.schema.baselines import ALL, NONE
from autockpt.schema.choices import (
    SAVE,
    Choice,
    CompileBudget,
    WrittenChoice,
    choice_kinds,
    dump_choice,
    dump_choices,
    legend,
)
from autockpt.schema.device import Environment
from autockpt.schema.files import set_aside, write_file, writing
from autockpt.schema.graph import Unit, UnitRole
from autockpt.schema.names import (
    Entry,
    align,
    check_nesting,
    expand,
    fold,
    listing,
    outermost,
    parse_pattern,
    strip_prefixes,
    views,
)
from autockpt.schema.sizes import ResolvedBudget, format_binary, format_bytes
from autockpt.schema.trial import Measurement, Prediction
from autockpt.schema.words import step_note
from autockpt.schema.workload import WorkloadSpec
from autockpt.schema.yaml import Document, read

PlanStatus = Literal["measured", "simulated", "unmeasured"]
CompileMode = Literal["layers", "model"]
"""How a training step is compiled: every layer in place, or the whole model as one. None stands for eager steps."""
NEVER_CALLED = "never called"
"""In a plan's settings: what would be units if the step called it, as a vision tower where it reads text alone."""
SCHEMA_VERSION = 1
R = TypeVar("R", Prediction | None, Measurement | None)
Verdict = Literal["fits", "over_budget", "out_of_memory", "not_measured"]

Choices = dict[Annotated[str, AfterValidator(validating(lambda text: parse_pattern(text).text))], WrittenChoice]
"""By pattern; read as a file has them."""
Names = Annotated[str, AfterValidator(validating(lambda text: parse_pattern(text).enumerate() and text))]
"""A pattern that stands for definite names."""


def _known_version(version: int) -> int:
    if not 1 <= version <= SCHEMA_VERSION:
        raise refused(
            f"this plan has schema {version}, written by a newer autockpt; this one reads up to {SCHEMA_VERSION}",
            "Upgrade with `pip install -U autockpt`, or search again with this version.",
        )
    return version


OF_A_SET = ("when", "hash", "share", "predicted", "measured", "choices")


class Comparison(Data):
    """One row of the answer: a baseline, or the one that was found, with what it was predicted to do."""

    name: str = Field(description="none, recompute all, every-2, offload all, inputs offloaded, ours")
    verdict: Verdict
    predicted: Prediction | None = None
    measured: Measurement | None = None
    plan_hash: str = ""
    note: str = ""


class Structure(Data):
    """The model that a plan was made for: its name, and the names and classes of its units, folded into ranges."""

    name: str = ""
    units: dict[Names, str] = Field(default_factory=dict, description="pattern of unit names -> class name")

    @cached_property
    def classes(self) -> dict[str, str]:
        """Class by exact unit name."""
        return {name: cls for pattern, cls in self.units.items() for name in parse_pattern(pattern).enumerate()}


class When(Data):
    """Which batches a set of choices is for: those with at most so many tokens, padding included.

    ``longest`` bounds the sequences as well, where attention keeps scores of every pair of tokens.
    """

    tokens: int = Field(gt=0, description="rows × padded length of a micro-batch")
    longest: int | None = Field(default=None, gt=0, description="padded length; of packed sequences the longest")

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens" + (f", sequences up to {self.longest:,}" if self.longest else "")

    def covers(self, tokens: int, longest: int) -> bool:
        """Whether a batch is no larger than this."""
        return tokens <= self.tokens and (self.longest is None or longest <= self.longest)


class Plan(Data):
    """A choice for every unit, with its provenance.

    ``choices`` are for every batch; where ``smaller_batches`` has sets of their own for smaller ones, the runtime goes
    by the first that covers the batch. Of these only the fields in ``OF_A_SET`` are given, ``hash`` with the
    tokens that they were found for; ``sets`` are all of them, each as a whole plan.

    ``hash`` is that of the choices which ``predicted`` and ``measured`` speak of. Where the choices no longer match it
    (the file was edited), ``status`` is "unmeasured", whatever ``source`` says. Bytes and seconds throughout.
    """

    autockpt: Annotated[int, AfterValidator(_known_version)] = SCHEMA_VERSION
    source: PlanStatus = "unmeasured"
    hash: str = ""
    model: Structure = Structure()
    workload: WorkloadSpec | None = None
    settings: Facts = Field(default_factory=dict, description="of the step: dtype, batch_size, seq_len, parameters, …")
    environment: Environment | None = None
    compile: CompileMode | None = Field(
        default=None, description="made for steps in which every layer, or the whole model, is compiled; None: eager"
    )
    budget: ResolvedBudget | None = None
    host_budget_bytes: int | None = Field(
        default=None, gt=0, description="most bytes that offloading may claim on the host; a real bound when applied"
    )
    predicted: Prediction | None = None
    measured: Measurement | None = None
    baselines: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()
    choices: Choices = Field(description="pattern of unit names -> choice")
    when: When | None = Field(default=None, description="the largest batch that ``choices`` were made for, where known")
    share: float | None = Field(default=None, ge=0, le=1, description="share of all batches that go by ``choices``")
    smaller_batches: tuple[Plan, ...] = Field(default=(), description="for smaller batches, the smallest first")
    _document: Document | None = PrivateAttr(default=None)
    _place: tuple[str | int, ...] = PrivateAttr(default=("choices",))

    def __eq__(self, other: object) -> bool:
        """Plans are equal by what they say, wherever they were read from."""
        return isinstance(other, Plan) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        """For what, what is done, peak, step time, and how to load it; a line more for each set of choices."""
        lines = [_made_for(self), f"  {_done(self)}", f"  peak {_peak(self)}", f"  step {_step(self)}"]
        lines += [f"  {line}" for line in set_lines(self)]
        if self.status == "simulated" and (note := step_note(self.environment, self.workload)):
            lines.append(f"  {note}")
        return "\n".join([*lines, f'  autockpt.apply(model, "{self.file if self.file != "PLAN" else "plan.yaml"}")'])

    @model_validator(mode="after")
    def _makes_sense(self) -> Plan:
        bounds = [plan.when for plan in (*self.smaller_batches, self) if plan.when is not None]
        if any(plan.when is None or not plan.choices for plan in self.smaller_batches):
            raise ValueError("smaller_batches need `when` and `choices` in each entry")
        for one, two in itertools.pairwise(bounds):
            if one.tokens >= two.tokens or (one.longest or 0) > (two.longest or math.inf):
                raise ValueError(f"smaller_batches go from small to large, and {one} come before {two}")
        if self.smaller_batches and self.compile == "model":
            raise ValueError("compile: model has one graph, which can have one set of choices, no smaller_batches")
        fractions = {choice.fraction for choice in self.choices.values() if isinstance(choice, CompileBudget)}
        if self.compile == "model" and len(fractions) > 1:
            raise ValueError(
                "compile: model has one graph, which can have one compile_budget, not "
                + " and ".join(f"{fraction:g}" for fraction in sorted(fractions))
            )
        return self

    @classmethod
    def create(
        cls,
        choices: Mapping[str, Choice],
        units: Sequence[Unit],
        *,
        model: str = "",
        **rest: Any,
    ) -> Plan:
        """A plan from choices by exact unit name. ``rest`` are the other fields, ``source`` among them.

        Seconds are rounded to microseconds, and those of single cycles are left to the history.
        """
        rest["predicted"], rest["measured"] = _tidy(rest.get("predicted")), _tidy(rest.get("measured"))
        rest["baselines"] = tuple(
            row.model_copy(update={"predicted": _tidy(row.predicted), "measured": _tidy(row.measured)})
            for row in rest.get("baselines", ())
        )
        structure = Structure(name=model, units=fold({u.name: u.cls for u in units}))
        return cls(hash=plan_hash(choices), model=structure, choices=fold(choices), **rest)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read and validate a plan file. Raises PlanError naming file, line and remedy."""
        document = read(path, PlanError)
        if not isinstance(document.data, dict) or "autockpt" not in document.data:
            raise document.complain((), "this is not a plan", f"A plan begins with `autockpt: {SCHEMA_VERSION}`.")
        plan = document.validate(cls)
        plan._document = document
        if plan.model.units:
            for each in plan.sets:
                each.expand_planned()  # so that patterns which clash or match nothing are refused here, with their line
        return plan

    def save(self, path: str | Path, *, replace: bool = False) -> Path | None:
        """Write the plan, whole or not at all.

        Where another file stands there, it is renamed to ``name.1``, and that path returned; ``replace`` overwrites it.
        A link stays, and that is about the file it leads to. Raises PlanError where the path cannot be written.
        """
        path = Path(path)
        if path.is_dir():
            raise PlanError(f"{path} is a directory", remedy="Give a file, as plan.yaml in it.")
        text, aside = self.text(path.name), None
        if path.is_file() and not replace and not self._is_in(path):
            with writing(path, PlanError):
                aside = set_aside(path.resolve())
        write_file(path, text, PlanError)
        return aside

    def _is_in(self, path: Path) -> bool:
        try:
            return Plan.load(path) == self
        except (PlanError, ValidationError):
            return False

    def text(self, name: str = "plan.yaml") -> str:
        """The text of a plan file: the choices first, then where they are from."""
        data = {"autockpt": self.autockpt, "choices": dump_choices(self.choices)}
        data |= self.model_dump(mode="json", exclude_defaults=True, exclude={"choices", "smaller_batches"})
        data["source"] = self.source
        if self.workload is not None:
            data["workload"] = self.workload.model_dump(mode="json", exclude_none=True)
        for each in self.smaller_batches:
            own = each.model_dump(mode="json", exclude_defaults=True) | {"choices": dump_choices(each.choices)}
            data.setdefault("smaller_batches", []).append({name: own[name] for name in OF_A_SET if name in own})
        layers, head = (", ".join(choice_kinds(role)) for role in ("block", "head"))
        kinds = textwrap.fill(
            f"# Choices: {layers}; for the output head, by its name: {head}.", width=110, subsequent_indent="# "
        )
        meanings = legend(choice for plan in (self, *self.smaller_batches) for choice in plan.choices.values())
        text = [_HEADER.format(name=name, kinds=kinds), f"autockpt: {data.pop('autockpt')}\n"]
        text.append(_section("choices", data.pop("choices"), meanings))
        text += [_section(key, data.pop(key)) for key in ("when", "share", "smaller_batches") if key in data]
        return "".join([*text, "\n", *(_section(key, data[key]) for key in Plan.model_fields if key in data)])

    @property
    def sets(self) -> tuple[Plan, ...]:
        """Every set of choices as a plan by itself, for the smallest batches first; a plan without others: itself."""
        if not self.smaller_batches:
            return (self,)
        fields: dict[str, Any] = {**self._fields, "smaller_batches": ()}
        found = list[Plan]()
        for number, each in enumerate(self.smaller_batches):
            assert each.when is not None
            digest, _, tokens = each.hash.partition("@")
            if tokens not in ("", str(each.when.tokens)):  # no longer for the batches that they were found for
                digest = "edited"
            own = {name: getattr(each, name) for name in OF_A_SET}
            own |= {"hash": digest, "baselines": (), "workload": self._at(each.when)}
            found.append(Plan(**{**fields, **own}))
            found[-1]._place = ("smaller_batches", number, "choices")
        found.append(Plan(**fields))
        for plan in found:
            plan._document = self._document
        return tuple(found)

    @property
    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Plan.model_fields}

    def _at(self, when: When) -> WorkloadSpec | None:
        """The workload with the longest sequences that a set is for."""
        rows = self.settings.get("batch_size") or (self.workload.batch_size if self.workload else None)
        length = (self.workload.seq_len if self.workload else None) or self.settings.get("seq_len")
        if self.workload is None or not isinstance(length, int) or not isinstance(rows, int):
            return self.workload
        return self.workload.model_copy(update={"seq_len": when.longest or max(1, when.tokens // rows)})

    def with_smaller(self, others: Iterable[Plan]) -> Plan:
        """This plan for all batches but those that one of ``others`` is for: its ``when`` says which."""
        sets: dict[int, Plan] = {}
        for plan in others:
            assert plan.when is not None
            own: dict[str, Any] = {name: getattr(plan, name) for name in OF_A_SET}
            own["hash"] = plan.hash and f"{plan.hash}@{plan.when.tokens}"
            sets[plan.when.tokens] = Plan(**own)
        return Plan(**{**self._fields, "smaller_batches": tuple(sets[tokens] for tokens in sorted(sets))})

    @property
    def file(self) -> str:
        """The path that the plan was read from, as it was given; a word for it where it was from none."""
        return self._document.name if self._document is not None else "PLAN"

    @cached_property
    def entries(self) -> tuple[Entry[Choice], ...]:
        """The lines under ``choices``, each with its place in the file where it came from one."""
        document = self._document
        return tuple(
            Entry(pattern, choice, document.where(*self._place, pattern) if document else "")
            for pattern, choice in self.choices.items()
        )

    def expand(self, unit_names: Iterable[str], head: str | None = None) -> dict[str, Choice]:
        """The choice of every unit by its exact name, as given.

        Outermost units that the plan does not mention get ``save``; sub-units appear only where it mentions them, and
        so does the output ``head``: last, and only where a line names it without wildcards. Wrapper prefixes (PEFT,
        compile, DDP, Lightning) are seen through. Raises PlanError for patterns that match nothing, a unit named twice,
        a choice inside another, and one that is for other units.
        """
        names = list(unit_names)
        lines = [e for e in self.entries if head is not None and _names(e.pattern, head)]
        rest = [e for e in self.entries if e not in lines]
        view = align([e.pattern for e in rest], names)
        owner = expand(rest, view, [head] if head is not None and not lines else [])
        check_nesting(owner)
        for name, entry in owner.items():
            _check_role(name, entry, "block")
        for entry in lines:
            _check_role(head, entry, "head")
        if len(lines) > 1:
            raise PlanError(lines[1].located(f"{head} is named twice"), remedy="Leave one of the two lines.")
        meant_choices: dict[str, Choice] = dict.fromkeys(outermost(view), SAVE)
        meant_choices |= {meant: entry.value for meant, entry in owner.items()}
        by_real_name = {view[meant]: choice for meant, choice in meant_choices.items()}
        choices = {name: by_real_name[name] for name in names if name in by_real_name}
        return choices | ({head: lines[0].value} if head is not None and lines else {})

    def choices_for(self, units: Iterable[Unit], head: Unit | None = None) -> dict[str, Choice]:
        """The choices for a model with these units and this output head.

        Raises PlanError where the plan was made for another model, or does not fit this one. To be used for a live
        model: ``runtime.choices_for``, which finds its units.
        """
        units = list(units)
        self.check_structure(units, head)
        return self.expand([unit.name for unit in units], head.name if head is not None else None)

    @property
    def head(self) -> str | None:
        """The output head by the name that the plan gives it, where a line has a choice that only a head can have."""
        entry = next((e for e in self.entries if "block" not in e.value.roles), None)
        return None if entry is None or "*" in entry.pattern else entry.pattern

    def expand_planned(self) -> dict[str, Choice]:
        """``expand`` over the units that the plan itself lists, its output head included."""
        head = self.head
        return self.expand([name for name in self.model.classes or self.choices if name != head], head)

    def lists(self, head: Unit | None) -> list[Unit]:
        """The model's output head, where it is among the units that the plan was made for."""
        return [head] if head is not None and any(_names(name, head.name) for name in self.model.classes) else []

    def check_structure(self, units: Iterable[Unit], head: Unit | None = None) -> None:
        """Raise PlanError where the plan was made for other units than these: others missing, new, or of another class.

        The output ``head`` counts only where the plan lists it, attentions and MLPs where it lists any. A plan written
        by hand without ``model.units`` fits any structure.
        """
        planned = self.model.classes
        if not planned:
            return
        blocks_only = len(outermost(list(planned))) == len(planned)
        units = [*(unit for unit in units if unit.role == "block" or not blocks_only), *self.lists(head)]
        view = align(self.model.units, [u.name for u in units])
        real = {u.name: u.cls for u in units}
        present = {meant: real[name] for meant, name in view.items()}
        for pattern in filter(None, str(self.settings.get(NEVER_CALLED) or "").split(",")):
            idle = tuple(f"{name}." for name in parse_pattern(pattern).select(present))
            present = {name: cls for name, cls in present.items() if not f"{name}.".startswith(idle)}
        if difference := _difference(planned, present):
            where = f"{self._document.where('model', 'units')}: " if self._document else ""
            raise PlanError(
                f"{where}this plan was made for another model: {difference}",
                remedy="Search again for this model; or delete the section `model:` to use the choices unmeasured.",
            )

    @property
    def status(self) -> PlanStatus:
        """``source`` where it still holds: "unmeasured" as soon as the choices are not those that were measured."""
        return "unmeasured" if self.status_reason else self.source

    @cached_property
    def status_reason(self) -> str:
        """Why the plan is unmeasured; empty where it is measured or simulated."""
        if self.source == "unmeasured":
            return "the plan says so itself" if self.hash else "the plan was written by hand"
        if self.source == "measured" and self.measured is None:
            return "the plan holds no measurement"
        if not self.model.units:
            return "the plan no longer says which units it was measured with"
        if self.hash != plan_hash(self.expand_planned()):
            return f"the choices were edited after the plan was {self.source}"
        smaller = (each.status_reason for each in self.sets[:-1])
        return next((f"for smaller batches: {why}" for why in smaller if why), "")


def _check_role(name: str | None, entry: Entry[Choice], role: UnitRole) -> None:
    """Raise PlanError where a line's choice is not for the kind of unit that it names."""
    if role not in entry.value.roles:
        here, them = ("the output head", "it") if role == "head" else ("no output head", "layers")
        remedy = f"Choices for {them}: {', '.join(choice_kinds(role))}."
        if entry.value.roles == ("head",):
            remedy += " A model of your own names its head by a method `get_output_embeddings()`."
        raise PlanError(entry.located(f"{entry.value} cannot be used on {name}, which is {here}"), remedy=remedy)


def _names(pattern: str, name: str) -> bool:
    """Whether a pattern is one unit's name, written with or without what wrappers put in front."""
    return any(strip_prefixes(pattern) in view for view in views([name]))


def plan_hash(choices: Mapping[str, Choice]) -> str:
    """Twelve hex digits for what a plan attaches: equal for plans that do the same.

    ``save`` attaches nothing, so units on ``save`` do not count, named or not.
    """
    attached = sorted((name, dump_choice(c)) for name, c in choices.items() if c != SAVE)
    return hashlib.sha256(json.dumps(attached, sort_keys=True).encode()).hexdigest()[:12]


def _tidy(reading: R) -> R:
    """A prediction or measurement with no more digits than people read."""
    if reading is None:
        return reading
    seconds = None if reading.step_seconds is None else round(reading.step_seconds, 6)
    more = {"noise": round(reading.noise, 4), "times": ()} if isinstance(reading, Measurement) else {}
    return reading.model_copy(update={"step_seconds": seconds} | more)


def _difference(planned: Mapping[str, str], present: Mapping[str, str]) -> str:
    """The first way in which two structures differ, in words; empty where they do not."""
    if missing := [n for n in planned if n not in present]:
        return f"it has no {listing(missing, 3)}"
    if new := [n for n in present if n not in planned]:
        return f"the plan knows no {listing(new, 3)}"
    other = next((name for name, cls in planned.items() if present[name] != cls), None)
    return "" if other is None else f"{other} is a {present[other]}, planned as a {planned[other]}"


# --- a plan as a file

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
    "baselines": "the usual plans, for comparison",
}
_BYTES = re.compile(r"^(\s*(?:- )?(?:\w+_)?bytes: )([0-9]{4,})$", re.MULTILINE)


class _OfChoices(yaml.SafeDumper):
    """Writes a choice with options in braces, as people do, not a line for each option."""

    def represent_choice(self, data: dict[str, Any]) -> yaml.MappingNode:
        return self.represent_mapping("tag:yaml.org,2002:map", data, flow_style="kind" in data)


_OfChoices.add_representer(dict, _OfChoices.represent_choice)


def _section(key: str, value: Any, comments: Sequence[str] = ()) -> str:
    """The text of one field, with its comment."""
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


# --- a plan in words


def applied(plan: Plan, choices: Mapping[str, Choice]) -> str:
    """One line for a training's log: which plan, how many units do what, its peak, its step against the usual plans.

    ``choices`` are those attached, by unit.
    """
    sets = f", and {words.counted(len(plan.smaller_batches), 'set')} of choices for smaller batches"
    done = f"{words.tally(choices)}{sets if plan.smaller_batches else ''}"
    named = f"plan {plan.hash}, {plan.status}" if plan.hash else "plan by hand"
    return f"{named}: {done}; {promised(plan)}"


def promised(plan: Plan) -> str:
    """The peak of a plan, and its step against the usual plans, as far as they are known."""
    return f"peak {_peak(plan)}; step {_step(plan)}"


def set_lines(plan: Plan) -> list[str]:
    """A line for each set of choices of a plan that has several, the smallest batches first."""
    if not plan.smaller_batches:
        return []
    lines = []
    for each in plan.sets:
        bound = f"up to {each.when}" if each.when is not None else "all larger"
        bound += ", and larger" if each.when is not None and each.when == plan.when else ""
        share = f", {words.share(each.share)} of batches" if each.share is not None else ""
        lines.append(f"{bound}{share}: {_done(each)}; {promised(each)}")
    return lines


def choice_lines(choices: Mapping[str, Choice]) -> list[str]:
    """A line for each choice, with the patterns that it is made for: ``h.0-3, h.7: offload``."""
    by_choice: dict[Choice, list[str]] = {}
    for pattern, choice in choices.items():
        by_choice.setdefault(choice, []).append(pattern)
    return [f"{', '.join(patterns)}: {choice}" for choice, patterns in by_choice.items()]


def _made_for(plan: Plan) -> str:
    where = plan.environment.device.name if plan.environment is not None else ""
    budget = f", budget {plan.budget.words} = {format_bytes(plan.budget.bytes)}" if plan.budget is not None else ""
    on = {"measured": f" on {where}", "simulated": f" for {where}"}.get(plan.status, "") if where else ""
    return f"Plan {plan.hash or 'by hand'} for {plan.model.name or 'any model'}: {plan.status}{on}{budget}"


def _done(plan: Plan) -> str:
    try:
        choices = plan.expand_planned() if plan.model.classes else {}
    except PlanError:
        choices = {}
    if not choices:  # how many units a pattern names is not known
        return "; ".join(choice_lines(plan.choices)) or "nothing: every unit saves"
    return words.strip_and_tally(choices)


def _peak(plan: Plan) -> str:
    reading = (plan.measured or plan.predicted) if plan.status != "unmeasured" else None
    if reading is None:
        return f"unknown: {plan.status_reason}"
    how, peak = "measured" if plan.measured is not None else "simulated, not measured", reading.peak_bytes
    left = "" if plan.budget is None else f", {format_binary(plan.budget.bytes - peak)} of the budget free"
    return f"{format_binary(peak)} {how}{left}"


def _step(plan: Plan) -> str:
    """The step time, compared with saving and recomputing everything as far as both were measured, or predicted."""
    score, of = (plan.measured, "measured") if plan.measured is not None else (plan.predicted, "predicted")
    if plan.status == "unmeasured" or score is None or not score.step_seconds:
        return "time unknown"
    rows, parts = {row.name: row for row in plan.baselines if row.plan_hash != plan.hash}, [words.step_of(score)]
    for name, than in ((NONE, "saving everything"), (ALL, "recomputing everything")):
        reading = getattr(rows[name], of) if name in rows else None
        if reading is not None and reading.step_seconds:
            parts.append(words.compared(score, reading, than))
        elif name in rows and rows[name].verdict == "out_of_memory":
            parts.append(f"{than} runs out of memory")
    return ", ".join(parts)
