"""What would make a job fit that no plan alone makes fit: changes of it, the least first, held against ghost runs.

Every change is judged with the same choice on every layer, so a search after it can only do better.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any, TypeVar

import torch

from autockpt.errors import AutockptError, ConflictError
from autockpt.hardware.nominal import nominal_op_times
from autockpt.profiling import MemoryModel, Predictor, UniformRuns, memory_at_hand, uniform_graphs
from autockpt.schema import SAVE, Budget, Choice, Environment, Graph, Listener, OpTimes, Prediction, Silence
from autockpt.schema.remedy import INEXACT, Alternative, batch, joined
from autockpt.tracing import Tracer
from autockpt.tuning.jobs import LEANER_OPTIMIZERS, Described, Job
from autockpt.tuning.opening import LEANEST_CHUNKS, blocks_of

T = TypeVar("T")
Times = Callable[[Sequence[Graph]], OpTimes]  # op times that cover these ghost runs
MOST = 3
SHARED, MOST_RANKS = "sharded over", 64
LORA_RANK = 16
SHORTEST = 128  # tokens
_CHUNKS = "head and loss in chunks: gradients equal up to rounding"
LEAN_KINDS = ("recompute_offload", "offload", "recompute")  # tried first: one of them is the leanest nearly always
FAR_OVER = 2  # times the budget: where one of these needs as much, the others do not fit either


SORTS = 12  # of changes at most: five single ones, five of two or three, shorter sequences, and all together


@dataclass(frozen=True)
class Change:
    """A variant of the job, what it is called, and whether its head runs in chunks."""

    job: Job
    options: str
    effect: str
    chunked: bool = False


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
    job: Job, settings: Mapping[str, Any], base: UniformRuns, bench: WhatIf, *, chunked: bool = False
) -> tuple[Alternative, ...]:
    """What makes a job fit, at most three ways: on one device first, those that change training least before others.

    Where no single change helps, changes are combined; shorter sequences come last, for they are another job.

    ``settings`` are the resolved ones of the job, ``base`` the ghost runs of its uniform plans. ``chunked``: its head
    runs in chunks already. Empty where nothing that is tried fits. Variants that cannot be built are left out.
    """
    leanest = min(predictions(bench, base).values(), key=lambda p: p.peak_bytes)
    standard = (leanest.step_seconds or 0.0) / _work(settings)
    held = next(graph.resident for _, graph in base.values())
    lighter = held.get("weights", 0) + held.get("optimizer states", 0) > bench.budget_bytes

    def mildest(families: Iterable[Iterator[Change]], most: int | None = None) -> list[Alternative]:
        ways = (_mildest(family, bench, standard) for family in families if not bench.late())
        return [*islice(filter(None, ways), most)]

    def alone(ways: Sequence[Alternative]) -> bool:
        return any(SHARED not in way.options for way in ways)

    found = mildest(_families(job, settings, chunked, lighter))
    if not alone(found):
        found += mildest(_combined(job, settings, chunked, lighter), most=1)
    if not alone(found):  # the last resort
        found += [] if lighter else mildest([_shorter_sequences(job, settings)])
        if not bench.late():
            together = _together(job, settings, chunked, shared=not found)
            found += mildest([together])
    return tuple(sorted(found, key=lambda way: SHARED in way.options)[:MOST])


def _families(job: Job, settings: Mapping[str, Any], chunked: bool, lighter: bool) -> Iterator[Iterator[Change]]:
    """Changes of one sort each, the mildest first; ``lighter``: only those by which weights or their states shrink."""
    if not lighter:
        yield _smaller_batches(job, settings)
    if not (chunked or lighter):
        yield iter([_in_chunks(Change(job, "", ""))])
    yield _with_adapters(job)
    yield _lean_optimizers(job)
    if job.ranks is not None:
        yield _sharded(Change(job, "", ""))


def _combined(job: Job, settings: Mapping[str, Any], chunked: bool, lighter: bool) -> Iterator[Iterator[Change]]:
    """Two changes and three, those that change training least first; sequences stay as long as they are."""
    batches = list(_smaller_batches(job, settings))
    if batches and not (lighter or chunked):
        yield map(_in_chunks, batches)
    for other, most in ((_lean_optimizers, 2), (_with_adapters, None)):
        both = _and(batches[-1] if batches else Change(job, "", ""), other)[:most]
        if batches:
            yield iter(both)
        if not chunked:
            yield map(_in_chunks, both)


def _and(change: Change, other: Callable[[Job], Iterator[Change]]) -> list[Change]:
    """A change, and each of others after it."""
    return [_extended(change, more.job, more.options, more.effect) for more in other(change.job)]


def _extended(change: Change, job: Job, options: str, effect: str, *, chunked: bool = False) -> Change:
    """A change, and one more."""
    effects = "; ".join(filter(None, (change.effect, effect)))
    return Change(job, joined(change.options, options), effects, change.chunked or chunked)


def _in_chunks(change: Change) -> Change:
    """The same with head and loss in chunks."""
    return _extended(change, change.job, INEXACT, _CHUNKS, chunked=True)


def _smaller_batches(job: Job, settings: Mapping[str, Any]) -> Iterator[Change]:
    rows = settings.get("batch_size") or 0
    for fewer in range(rows // 2, 0, -1):
        smaller = job.smaller_batch(rows, fewer) if rows % fewer == 0 else None
        if smaller is not None:
            options = batch(fewer, smaller.accumulate)
            yield Change(smaller, options, f"batch {rows} → {fewer}, the same rows in every optimizer step")


def _shorter_sequences(job: Job, settings: Mapping[str, Any], of: Change | None = None) -> Iterator[Change]:
    """Half as long, and half as long again; after the change ``of`` where there is one."""
    length = tokens = settings.get("seq_len") or 0
    of = of or Change(job, "", "")
    while tokens // 2 >= SHORTEST:
        tokens //= 2
        shorter = of.job.shorter(length, tokens)
        if shorter is None:
            return
        yield _extended(of, shorter, f"sequences of {tokens} tokens", "shorter sequences")


def _with_adapters(job: Job) -> Iterator[Change]:
    """Adapters alone, and these on a base in 4 bits."""
    for options, effect, adapted in job.adapted(LORA_RANK):
        yield Change(adapted, options, effect)


def _sharded(start: Change) -> Iterator[Change]:
    """Over more and more devices, each with rows of its own."""
    ranks = 2 * (start.job.ranks or 1)
    while ranks <= MOST_RANKS:
        said = f"weights, gradients and optimizer states shared by {ranks} devices; what these send is not counted"
        yield _extended(start, start.job.sharded(ranks), f"{SHARED} {ranks} devices", said)
        ranks *= 2


def _lean_optimizers(job: Job) -> Iterator[Change]:
    """Optimizers that hold less."""
    for name, leaner in job.leaner_optimizers():
        yield Change(leaner, f"optimizer {name}", LEANER_OPTIMIZERS[name])


def _together(job: Job, settings: Mapping[str, Any], chunked: bool, shared: bool) -> Iterator[Change]:
    """All at once, for jobs that no single change helps: single rows, adapters, shorter and shorter, more devices."""
    smallest = list(_smaller_batches(job, settings))[-1:]
    start = smallest[0] if smallest else Change(job, "", "")
    if adapted := _and(start, _with_adapters):
        yield from adapted
        start = adapted[-1]
    elif not chunked:
        start = _in_chunks(start)
    yield from _shorter_sequences(job, settings, start)
    if shared and job.ranks is not None:
        yield from _sharded(start)


def mildest_that_fits(changes: Sequence[T], fits: Callable[[T], bool]) -> T | None:
    """The first of ``changes`` that fits, of ever larger ones: all behind one that fits do. By bisection."""
    if not changes or not fits(changes[-1]):
        return None
    return changes[bisect_left(changes, True, key=fits)]


def _mildest(changes: Iterator[Change], bench: WhatIf, standard: float) -> Alternative | None:
    """The mildest change that fits; None where none does, or this sort of change is not possible for this job."""
    with ExitStack() as stack:
        try:
            series = [_Variant(change, bench, stack) for change in changes]
            found = mildest_that_fits(series, lambda variant: variant.fits)
            return None if found is None else found.way(standard)
        except AutockptError:
            return None
        finally:
            bench.listener.advance()


class _Variant:
    """A change, ghost-run as far as it was asked about. Its tracer is closed with ``stack``."""

    def __init__(self, change: Change, bench: WhatIf, stack: ExitStack) -> None:
        self._change, self._bench, self._stack = change, bench, stack
        self._uniform: dict[str, tuple[dict[str, Choice], Graph]] = {}  # as ``uniform_graphs`` gives them

    @cached_property
    def _tracer(self) -> Tracer:
        return self._stack.enter_context(self._change.job.tracer(self._bench.device))

    @cached_property
    def fits(self) -> bool:
        """Whether the same choice on every layer makes it fit, of which the leanest are asked. No, when it is late."""
        if self._bench.late():
            return False
        if self._change.chunked and self._tracer.head is None:
            return False
        if _ignored(self._change.job, self._tracer.settings):
            return False
        lean = [kind for kind in LEAN_KINDS if kind in self._bench.kinds] or list(self._bench.kinds)
        for kind in filter(self._run, lean):
            choices, graph = self._uniform[kind]
            if graph.resident_bytes > self._bench.budget_bytes:  # whatever the layers do
                return False
            peak = predictions(self._bench, {kind: (choices, graph)})[kind].peak_bytes
            if peak <= self._bench.budget_bytes:
                return True
            if peak > FAR_OVER * self._bench.budget_bytes:
                return False
        return False

    def way(self, standard: float) -> Alternative | None:
        """The change with the fastest uniform plan that fits; ``standard``: seconds per token."""
        for kind in self._bench.kinds:
            self._run(kind)
        known = predictions(self._bench, self._uniform)
        fitting = [kind for kind, said in known.items() if said.peak_bytes <= self._bench.budget_bytes]
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
            spare_bytes=self._bench.budget_bytes - best.peak_bytes,
            step_seconds=best.step_seconds if self._bench.seconds else None,
            relative_cost=(best.step_seconds or 0.0) / work / standard if standard else 1.0,
        )

    @property
    def _besides(self) -> dict[str, Choice]:
        """What the output head does: of its choices the leanest."""
        head, choice = self._tracer.head, self._bench.head
        if self._change.chunked:
            choice = LEANEST_CHUNKS
        return {head.name: choice} if head is not None and choice != SAVE else {}

    def _run(self, kind: str) -> bool:
        """Ghost-run a choice on every layer, once; whether it can be attached."""
        if kind not in self._uniform:
            try:
                self._uniform |= uniform_graphs(self._tracer, blocks_of(self._tracer), (kind,), self._besides)
            except ConflictError:
                return False
        return True


def predictions(bench: WhatIf, uniform: UniformRuns) -> dict[str, Prediction]:
    """What each choice on every layer would come to, by kind."""
    judge = Predictor(None, bench.times([graph for _, graph in uniform.values()]), needs=bench.needs)
    return {kind: judge.learn(choices, graph) for kind, (choices, graph) in uniform.items()}


def _ignored(job: Job, settings: Mapping[str, Any]) -> bool:
    """Whether the user's own function made something else than what was asked for."""
    if not isinstance(job, Described):
        return False
    asked = {"batch_size": job.spec.batch_size, "seq_len": job.spec.seq_len}
    return any(value is not None and settings.get(name) not in (None, value) for name, value in asked.items())


def _work(settings: Mapping[str, Any]) -> float:
    """Tokens of one cycle, or its rows."""
    tokens = settings.get("tokens")
    return float(tokens or (settings.get("batch_size") or 1) * (settings.get("accumulate") or 1))
