"""Suggest changes of a job that no plan makes fit: smaller batches, the head in chunks, adapters, leaner optimizers.

Each change is ghost-run with one choice on all layers, so a search after it can only do better. The mildest change of
each kind that fits is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any

import torch

from autockpt.cost import MemoryModel, Predictor, UniformRuns, memory_at_hand, uniform_graphs
from autockpt.cost.roofline import nominal_op_times
from autockpt.errors import AutockptError, ConflictError
from autockpt.schema import (
    SAVE,
    Budget,
    Choice,
    Environment,
    Graph,
    Listener,
    OpTimes,
    Prediction,
    SearchRequest,
    Silence,
)
from autockpt.schema.remedy import FOUR_BITS, INEXACT, Alternative, batch, joined
from autockpt.tracing import Tracer
from autockpt.tuning.jobs import largest_that_fits, tracer_of, with_rows
from autockpt.tuning.opening import LEANEST_CHUNKS, blocks_of
from autockpt.workload.factory import is_factory
from autockpt.workload.lengths import with_length

Times = Callable[[Sequence[Graph]], OpTimes]  # op times that cover these ghost runs
MOST = 3
SHARED, MOST_RANKS = "sharded over", 64
LORA_RANK = 16
SHORTEST = 128  # tokens
_CHUNKS = "head and loss in chunks: gradients equal up to rounding"
LEAN_KINDS = ("recompute_offload", "offload", "recompute")  # tried first: one of them is the leanest nearly always
FAR_OVER = 2  # times the budget: where one of these needs as much, the others do not fit either


SORTS = 12  # of changes at most: five single ones, five of two or three, shorter sequences, and all together
_ADAPTERS = "adapters only are trained"
FUSED, EIGHT_BIT, PLAIN = "adamw_fused", "adamw8bit", "sgd"
LEANER_OPTIMIZERS = {
    FUSED: "no temporaries of the optimizer; the same update up to rounding",
    EIGHT_BIT: "optimizer states in 8 bits; other training",
    PLAIN: "no optimizer states; other training",
}
"""The mildest first, and what each changes."""


@dataclass(frozen=True)
class Change:
    """A variant of the job, what it is called, and whether its head runs in chunks."""

    job: SearchRequest
    options: str = ""
    effect: str = ""
    chunked: bool = False

    def then(self, options: str, effect: str, *, chunked: bool = False, **update: Any) -> Change:
        """This change and one more: ``update`` of a described workload, or its live ``step``."""
        job = self.job
        if update and job.workload is not None:
            update = {"workload": job.workload.model_copy(update=update)}
        effects = "; ".join(filter(None, (self.effect, effect)))
        changed = job.model_copy(update=update)
        return Change(changed, joined(self.options, options), effects, self.chunked or chunked)


@dataclass(frozen=True)
class WhatIf:
    """What variants are judged by: their budget in bytes, the device they would run on, and its op times.

    ``kinds`` are the choices that are allowed; ``needs`` says what a ghost run takes where that is more than its
    tensors; ``seconds``: whether op times are good for more than ranking, ``step_note`` what is known of their error.
    ``late`` says when to look for no more. ``head`` is what the output head does unless it runs in chunks with the
    loss. ``listener`` sees each sort of change pass.
    """

    budget_bytes: int
    device: torch.device
    times: Times
    kinds: tuple[str, ...]
    needs: MemoryModel | None
    seconds: bool = True
    step_note: str = ""
    late: Callable[[], bool] = lambda: False
    head: Choice = SAVE
    listener: Listener = field(default_factory=Silence)


def on_device(
    budget: Budget, torch_device: torch.device, environment: Environment, used_by_others: int, kinds: Iterable[str]
) -> WhatIf:
    """Variants of the job on a device at hand, within what others leave of it, at nominal rates of its kind."""
    room = environment.device.capacity_bytes - used_by_others
    budget_bytes = min(budget.resolve(0, 0, room), room)
    times, needs = partial(nominal_op_times, environment), memory_at_hand(environment, budget_bytes)
    return WhatIf(budget_bytes, torch_device, lambda graphs: times(*graphs), tuple(kinds), needs, seconds=False)


def alternatives(
    job: SearchRequest, settings: Mapping[str, Any], base: UniformRuns, what_if: WhatIf, *, chunked: bool = False
) -> tuple[Alternative, ...]:
    """What makes a job fit, at most three ways: on one device first, those that change training least before others.

    Where no single change helps, changes are combined; shorter sequences come last, for they are another job.

    ``settings`` are the resolved ones of the job, ``base`` the ghost runs of its uniform plans. ``chunked``: its head
    runs in chunks already. Empty where nothing that is tried fits. Variants that cannot be built are left out.
    """
    leanest = min(predictions(what_if, base).values(), key=lambda p: p.peak_bytes)
    standard = (leanest.step_seconds or 0.0) / _work(settings)
    as_it_is, length = Change(job), settings.get("seq_len") or 0
    batches = list(_smaller_batches(as_it_is, settings.get("batch_size") or 0))
    smallest = batches[-1] if batches else as_it_is
    found: list[Alternative] = []

    def try_each(*families: Iterable[Change], most: int | None = None) -> bool:
        """Whether a change is found by now that needs no further devices."""
        ways = (_mildest(family, what_if, standard) for family in families if not what_if.late())
        found.extend(islice(filter(None, ways), most))
        return any(SHARED not in way.options for way in found)

    chunks = [] if chunked else [_in_chunks(as_it_is)]
    if not try_each(batches, chunks, _with_adapters(as_it_is), _lean_optimizers(as_it_is), _sharded(as_it_is)):
        leaner = [*islice(_lean_optimizers(smallest), 2)], [*_with_adapters(smallest)]
        both = leaner if batches else ()
        more = () if chunked else (map(_in_chunks, family) for family in (batches, *leaner))
        if not try_each(*more, *both, most=1):  # the last resort: shorter sequences; then all at once
            try_each(_shorter_sequences(as_it_is, length))
            start = [smallest if chunked else _in_chunks(smallest), *_with_adapters(smallest)][-1]
            shared = () if found else _sharded(start)
            try_each(chain(_with_adapters(smallest), _shorter_sequences(start, length), shared))
    return tuple(sorted(found, key=lambda way: SHARED in way.options)[:MOST])


def _in_chunks(of: Change) -> Change:
    """The same with head and loss in chunks."""
    return of.then(INEXACT, _CHUNKS, chunked=True)


def _smaller_batches(of: Change, rows: int) -> Iterator[Change]:
    """Fewer of these rows in a micro-batch, and as many more of these; none of a batch that cannot be divided."""
    spec, step = of.job.workload, of.job.step
    for fewer in range(rows // 2, 0, -1):
        if rows % fewer:
            continue
        accumulate = (step if spec is None else spec).accumulate * (rows // fewer)
        update: dict[str, Any] = {"batch_size": fewer, "accumulate": accumulate}
        if spec is None:
            cut_step = with_rows(step, fewer, accumulate) if step.settings.get("batch_size") == rows else None
            if cut_step is None:
                return
            update = {"step": cut_step}
        said = f"batch {rows} → {fewer}, the same rows in every optimizer step"
        yield of.then(batch(fewer, accumulate), said, **update)


def _shorter_sequences(of: Change, length: int) -> Iterator[Change]:
    """Half as long, and half as long again: ids, labels and masks cut."""
    step, tokens = of.job.step, length
    while tokens // 2 >= SHORTEST:
        tokens //= 2
        update: dict[str, Any] = {"seq_len": tokens, "pad_to": None}
        if of.job.workload is None:
            update = {"step": with_length(step, tokens)}
        yield of.then(f"sequences of {tokens} tokens", "shorter sequences", **update)


def _with_adapters(of: Change) -> Iterator[Change]:
    """Adapters alone trained, then these on a base in 4 bits; a model at hand is trained as it is.

    Only what this job has not already, and what can be put on it.
    """
    if (spec := of.job.workload) is None:
        return
    options = ""
    if spec.lora is None:
        options = f"LoRA of rank {LORA_RANK}"
        yield of.then(options, _ADAPTERS, lora=LORA_RANK)
    if not (spec.load_in_4bit or spec.load_in_8bit or spec.quantization or is_factory(spec.model)):
        effect = f"{_ADAPTERS} on a base in 4 bits" if options else "the base in 4 bits"
        yield of.then(joined(options, FOUR_BITS), effect, lora=spec.lora or LORA_RANK, load_in_4bit=True)


def _lean_optimizers(of: Change) -> Iterator[Change]:
    """Optimizers that hold less; the mildest first.

    AdamW in one kernel, which holds no temporaries; states in 8 bits, which take a library and CUDA; SGD.
    """
    spec, step = of.job.workload, of.job.step
    if spec is None:
        optimizer = step.optimizer
        if optimizer is not None and not isinstance(optimizer, torch.optim.SGD) and step.full_step is None:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            plain = replace(step, optimizer=torch.optim.SGD(trained, lr=1e-3), settings={})
            yield of.then(f"optimizer {PLAIN}", LEANER_OPTIMIZERS[PLAIN], step=plain)
    elif (now := spec.optimizer) not in ("none", PLAIN):
        tried = {FUSED: now == "adamw", EIGHT_BIT: now != EIGHT_BIT and of.job.hardware is not None, PLAIN: True}
        for name in (name for name, wanted in tried.items() if wanted):
            yield of.then(f"optimizer {name}", LEANER_OPTIMIZERS[name], optimizer=name)


def _sharded(of: Change) -> Iterator[Change]:
    """Over more and more devices, each with rows of its own; only where that can be simulated."""
    if of.job.hardware is None:
        return
    ranks = 2 * (of.job.described.shard or 1)
    while ranks <= MOST_RANKS:
        said = f"weights, gradients and optimizer states shared by {ranks} devices; what these send is not counted"
        yield of.then(f"{SHARED} {ranks} devices", said, shard=ranks)
        ranks *= 2


def _mildest(changes: Iterable[Change], what_if: WhatIf, standard: float) -> Alternative | None:
    """The mildest change that fits; None where none does, or this sort of change is not possible for this job."""
    with ExitStack() as stack:
        try:
            series = [_Variant(change, what_if, stack) for change in changes]
            found = largest_that_fits(series, lambda variant: variant.fits)
            return None if found is None else found.way(standard)
        except AutockptError:
            return None
        finally:
            what_if.listener.advance()


class _Variant:
    """A change, ghost-run as far as it was asked about. Its tracer is closed with ``stack``."""

    def __init__(self, change: Change, what_if: WhatIf, stack: ExitStack) -> None:
        self._change, self._what_if, self._stack = change, what_if, stack
        self._known: dict[str, Prediction | None] = {}  # by the choice on every layer; None: it cannot be attached
        self._resident_bytes = 0

    @cached_property
    def _tracer(self) -> Tracer:
        return self._stack.enter_context(tracer_of(self._change.job, self._what_if.device))

    @cached_property
    def fits(self) -> bool:
        """Whether the same choice on every layer makes it fit, of which the leanest are asked. No, when it is late."""
        if self._what_if.late():
            return False
        if self._change.chunked and self._tracer.head is None:
            return False
        if _ignored(self._change.job, self._tracer.settings):
            return False
        lean = [kind for kind in LEAN_KINDS if kind in self._what_if.kinds] or list(self._what_if.kinds)
        for said in filter(None, map(self._predicted, lean)):
            if said.peak_bytes <= self._what_if.budget_bytes:
                return True
            # whatever the layers do; or so far off that no other choice is lean enough
            if max(self._resident_bytes, said.peak_bytes // FAR_OVER) > self._what_if.budget_bytes:
                return False
        return False

    def way(self, standard: float) -> Alternative | None:
        """The change with the fastest uniform plan that fits; ``standard``: seconds per token."""
        known = {kind: said for kind in self._what_if.kinds if (said := self._predicted(kind)) is not None}
        fitting = [kind for kind, said in known.items() if said.peak_bytes <= self._what_if.budget_bytes]
        if not fitting:
            return None
        kind = min(fitting, key=lambda kind: known[kind].step_seconds or 0.0)
        best, work = known[kind], _work(self._tracer.settings)
        head = "".join(f" and {name} on {choice.kind}" for name, choice in self._besides.items())
        return Alternative(
            options=self._change.options,
            effect=self._change.effect,
            plan=f"every layer on {kind}{head}",
            peak_bytes=best.peak_bytes,
            spare_bytes=self._what_if.budget_bytes - best.peak_bytes,
            step_seconds=best.step_seconds if self._what_if.seconds else None,
            relative_cost=(best.step_seconds or 0.0) / work / standard if standard else 1.0,
        )

    @property
    def _besides(self) -> dict[str, Choice]:
        """What the output head does: of its choices the leanest."""
        head, choice = self._tracer.head, self._what_if.head
        if self._change.chunked:
            choice = LEANEST_CHUNKS
        return {head.name: choice} if head is not None and choice != SAVE else {}

    def _predicted(self, kind: str) -> Prediction | None:
        """What a choice on every layer would come to, ghost-run once; None where it cannot be attached."""
        if kind not in self._known:
            try:
                uniform = uniform_graphs(self._tracer, blocks_of(self._tracer), (kind,), self._besides)
            except ConflictError:
                self._known[kind] = None
            else:
                self._resident_bytes = uniform[kind][1].resident_bytes
                self._known |= predictions(self._what_if, uniform)
        return self._known[kind]


def predictions(what_if: WhatIf, uniform: UniformRuns) -> dict[str, Prediction]:
    """What each choice on every layer would come to, by kind."""
    judge = Predictor(None, what_if.times([graph for _, graph in uniform.values()]), needs=what_if.needs)
    return {kind: judge.learn(choices, graph) for kind, (choices, graph) in uniform.items()}


def _ignored(job: SearchRequest, settings: Mapping[str, Any]) -> bool:
    """Whether the user's own function made something else than what was asked for."""
    if (spec := job.workload) is None:
        return False
    asked = {"batch_size": spec.batch_size, "seq_len": spec.seq_len}
    return any(value is not None and settings.get(name) not in (None, value) for name, value in asked.items())


def _work(settings: Mapping[str, Any]) -> float:
    """Tokens of one cycle, or its rows."""
    tokens = settings.get("tokens")
    return float(tokens or (settings.get("batch_size") or 1) * (settings.get("accumulate") or 1))
