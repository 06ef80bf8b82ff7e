"""What would change the answer: batch, length, chunked loss, adapters, sharding; by arithmetic on traced steps."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autockpt.explaining.holdings import COME_AND_GO, GRADIENTS, LOGITS
from autockpt.page.plans import GHOST
from autockpt.page.tape import Timeline
from autockpt.schema import Plan, ResolvedBudget, format_binary, words
from autockpt.schema.batches import SizesTimed
from autockpt.schema.choices import ChunkedLoss
from autockpt.schema.outlook import Outlook
from autockpt.schema.remedy import COMMAND_LINE, STEP, Alternative
from autockpt.workload.factory import is_factory

STATES = "optimizer states"
CHUNKED = "Head and loss in chunks"


@dataclass(frozen=True)
class JobChange:
    """A change of the job, what it would do, how that is known, and how to find out exactly."""

    name: str
    effect: str
    exactly: str
    basis: str = "arithmetic"


@dataclass(frozen=True)
class Asked:
    """How a run's job was asked for, which says how another one is: only by options that this command line takes.

    ``question`` is the run's, without a workload where the step was live; ``command`` its command lines.
    """

    question: Mapping[str, Any]
    command: str

    def batch(self, rows: int, accumulate: int) -> str:
        """Other micro-batches; a search for these (``--global-batch``) decides about them itself."""
        said = COMMAND_LINE.batch.format(rows=rows, accumulate=accumulate)
        return self._option("batch_size", said, f"a batch of {rows}", "--global-batch", "--tokens-per-update")

    def length(self, tokens: int) -> str:
        said = COMMAND_LINE.length.format(length=tokens)
        if (padded := self._workload.get("pad_to")) is not None and padded < tokens:
            said += f" --pad-to {tokens}"
        if self._workload.get("weights"):  # random ones are made with as many as it takes
            said += " (if the model has as many positions)"
        return self._option("seq_len", said, STEP.length.format(length=tokens), "--lengths")

    @property
    def adapters(self) -> str:
        """A factory attaches them itself: to one that made the optimizer, too, nobody else can."""
        return self._option("lora", COMMAND_LINE.lora.format(rank=16), STEP.lora.format(rank=16))

    @property
    def chunks(self) -> str:
        return self._without(COMMAND_LINE.chunks, "--compile") if self._workload else STEP.chunks

    def sharded(self, ranks: int) -> str:
        """Real steps on several devices are nothing that is searched for."""
        if self.question.get("hardware"):
            return f"--shard {ranks}"
        said = f"--shard {ranks} --hardware NAME"
        return self._without(said, "--device", "--weights", "--compile") if self._workload else f"--model NAME {said}"

    @property
    def _workload(self) -> Mapping[str, Any]:
        return self.question.get("workload") or {}

    def _option(self, field: str, said: str, otherwise: str, *against: str) -> str:
        """An option for a field of the workload; ``otherwise`` where a factory or the user's own program decides.

        Which options a factory takes is known of those that it was given.
        """
        if not self._workload:
            return otherwise
        factory = self._workload["model"]
        if is_factory(factory) and self._workload.get(field) is None:
            return f"in {factory}: {otherwise}"
        return self._without(said, *against)

    def _without(self, said: str, *against: str) -> str:
        """Options, and which of those that were given they do not go with."""
        given = {word.partition("=")[0] for line in self.command.splitlines() for word in shlex.split(line)}
        met = [option for option in against if option in given]
        return f"{said} without {' and '.join(met)}" if met else said


def changes(
    outlook: Outlook,
    sizes: SizesTimed | None,
    tapes: Sequence[Timeline],
    settings: Mapping[str, Any],
    budget: ResolvedBudget | None,
    plan: Plan | None,
    asked: Asked,
) -> tuple[JobChange, ...]:
    """Micro-batches that were timed, what the search ghost-ran, then estimates for other changes.

    These are at the peak of the plan's own step, of the plain one where there is no plan; it may move elsewhere.
    """
    accumulate = settings.get("accumulate") or 1
    rows = (settings.get("batch_size") or 1) * accumulate
    found = [*_sizes(sizes, rows, asked), *(_ghost_run(way) for way in outlook.changes)]
    chunked, now = outlook.chunked_peak_bytes, (plan.measured or plan.predicted) if plan is not None else None
    if chunked is not None and now is not None:
        less = now.peak_bytes - chunked
        effect = f"this plan would peak at {format_binary(chunked)}, {format_binary(abs(less))} "
        effect += f"{'less' if less >= 0 else 'more'} (gradients equal up to rounding)"
        found.append(JobChange(CHUNKED, effect, asked.chunks, GHOST))
    if not tapes:
        return tuple(found)
    tape, held = tapes[-1], dict(tapes[-1].held)
    moving = sum(held.get(name, 0) for name in COME_AND_GO)
    spare = budget.bytes - (now.peak_bytes if now is not None else tape.peak) if budget is not None else None
    if isinstance(batch := settings.get("batch_size"), int) and batch > 0 and moving:
        effect = f"about {format_binary(moving // batch)} more" + _room(spare, moving // batch)
        found.append(JobChange("One more sample in the batch", effect, asked.batch(batch + 1, accumulate)))
    if isinstance(length := settings.get("seq_len"), int) and length > 0 and moving:
        each = moving // length * 64
        effect = f"about {format_binary(each)} more for 64 tokens, if attention does not keep its scores"
        found.append(JobChange("Longer sequences", effect + _room(spare, each, 64), asked.length(length + 64)))
    if (logits := held.get(LOGITS, 0)) and chunked is None and not plan_in_chunks(plan):
        effect = f"takes up to {format_binary(logits)} off this moment (gradients equal up to rounding)"
        found.append(JobChange(CHUNKED, effect, asked.chunks))
    trained = held.get(GRADIENTS, 0) + held.get(STATES, 0)
    if trained and not settings.get("lora") and not _few_train(settings):
        effect = f"takes nearly all of {format_binary(trained)} of gradients and optimizer states off this moment"
        found.append(JobChange("Adapters instead of all weights", effect, asked.adapters))
    held_by_all = trained + held.get("weights", 0)
    if held_by_all and not asked.question.get("workload", {}).get("shard"):
        effect = f"takes about {format_binary(held_by_all // 2)} off, if weights, gradients and states are split"
        found.append(JobChange("Sharding over two devices", effect, asked.sharded(2)))
    return tuple(found)


def _few_train(settings: Mapping[str, Any]) -> bool:
    """Whether most weights are frozen, as in a live model with adapters, whose settings name no rank."""
    numbers, trained = settings.get("params"), settings.get("trainable_params")
    return bool(numbers) and trained is not None and trained < numbers / 2


def plan_in_chunks(plan: Plan | None) -> bool:
    """Whether head and loss run in chunks already."""
    return plan is not None and any(isinstance(choice, ChunkedLoss) for choice in plan.expand_planned().values())


def _sizes(sizes: SizesTimed | None, rows: int, asked: Asked) -> Iterator[JobChange]:
    """Micro-batches by their updates of so many rows, timed side by side."""
    if sizes is None:
        return
    undecided = dict.fromkeys(sizes.undecided, " — cannot be distinguished from the fastest")
    said = undecided | {sizes.winner: " — the fastest"}
    for size, times in sizes.times.items():
        effect = f"an update takes {words.seconds(statistics.median(times))}{said.get(size, '')}"
        yield JobChange(f"Micro-batches of {size}", effect, asked.batch(size, rows // size), "measured")


def _ghost_run(way: Alternative) -> JobChange:
    """A change that makes a job fit, with its figures."""
    spare = way.spare_bytes
    fits = f", {format_binary(spare)} to spare" if spare is not None and spare >= 0 else ""
    effect = f"peak {format_binary(way.peak_bytes)}{fits} with {way.plan}"
    if way.step_seconds is not None:
        effect += f", {words.seconds(way.step_seconds)} a step"
    effect += f", {way.relative_cost:.2f} times the seconds per token of the leanest plan of the job as it is"
    name, _, rest = way.effect.partition(": ")
    return JobChange(name[:1].upper() + name[1:], f"{effect}{f' ({rest})' if rest else ''}", way.options, GHOST)


def _room(spare: int | None, each: int, unit: int = 1) -> str:
    if spare is None or each <= 0:
        return ""
    more = spare // each * unit
    return f"; the headroom holds {more} more" if more > 0 else "; the headroom does not hold it with this plan"
