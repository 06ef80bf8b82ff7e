"""What is said of a budget that no plan reaches: the mildest change of each sort that fits, found by ghost runs alone.

Every change is judged with the same choice on every layer, so a search after it can only do better.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, get_args

import torch

from autockpt.devices import Device
from autockpt.errors import AutockptError, ConflictError, DeviceOutOfMemory, InfeasibleError
from autockpt.profiling import (
    CostModel,
    MemoryModel,
    Predictor,
    UniformRuns,
    memory_at_hand,
    nominal_op_times,
    tracer_for,
    uniform_graphs,
)
from autockpt.schema import (
    Choice,
    Environment,
    Graph,
    Hardware,
    OpTimes,
    Prediction,
    ResolvedBudget,
    SearchRequest,
    WorkloadSpec,
    format_bytes,
    plan_hash,
)
from autockpt.schema.choices import CHUNKED_LOSS, ChunkedLoss
from autockpt.schema.remedy import WayOut
from autockpt.schema.workload import OptimizerName
from autockpt.tracing import Tracer
from autockpt.tuning.opening import CHUNKS, Traced, blocks_of
from autockpt.tuning.question import Clock

Times = Callable[[Sequence[Graph]], OpTimes]  # op times that cover these ghost runs
MOST = 3
WORTH = 0.01  # by less the head's chunks are no way out
SHARD, MOST_RANKS = "--shard", 64
LORA_RANK = 16
SHORTEST = 128  # tokens
MICRO_STEPS = 2
_CHUNKS = "head and loss in chunks: gradients equal up to rounding"
SMALLER_JOB = (
    "use a smaller --batch-size (with --accumulate to keep its effect), a shorter --seq-len, --lora, or --optimizer sgd"
)
LEAN_KINDS = ("recompute_offload", "offload", "recompute")  # tried first: one of them is the leanest nearly always


@dataclass(frozen=True)
class Change:
    """A variant of the job, what it is called, and whether its head runs in chunks."""

    spec: WorkloadSpec
    options: str
    effect: str
    chunked: bool = False


@dataclass(frozen=True)
class WhatIf:
    """What variants are judged by: their budget in bytes, the device they would run on, and its op times.

    ``kinds`` are the choices that are allowed; ``needs`` says what a ghost run takes where that is more than its
    tensors; ``seconds``: whether op times are good for more than ranking; ``hardware``: what a simulated device is.
    """

    budget_bytes: int
    device: torch.device
    times: Times
    kinds: tuple[str, ...]
    needs: MemoryModel | None
    seconds: bool = True
    hardware: Hardware | None = None

    def tracer(self, spec: WorkloadSpec) -> Tracer:
        """A tracer of a variant. Raises what ``Tracer.from_spec`` does."""
        if self.hardware is not None:
            return tracer_for(self.hardware, spec, fallback=False)
        return Tracer.from_spec(spec, device=self.device, fallback=False)


def on_device(request: SearchRequest, device: Device, environment: Environment, kinds: Iterable[str]) -> WhatIf:
    """Variants of the job on a device at hand, within what others leave of it, at nominal rates of its kind."""
    room = environment.device.capacity_bytes - device.used_by_others()
    budget = min(request.budget.resolve(0, 0, room), room)
    times, needs = partial(nominal_op_times, environment), memory_at_hand(environment.device, budget)
    return WhatIf(budget, device.torch_device, lambda g: times(*g), tuple(kinds), needs, seconds=False)


def nothing_fits(
    profiled: CostModel, budget: ResolvedBudget, smallest_peak: int, measured_peak: int = 0
) -> InfeasibleError:
    """The error for a budget that nothing fits, with what the leanest plan's bytes go to.

    ``measured_peak``: the least of real steps, which may be above ``smallest_peak``, the least that is predicted.
    """
    host = profiled.host_budget
    within = f" with at most {format_bytes(host)} of host memory" if host is not None else ""
    wider = " or --host-budget" if host is not None else ""
    size, headroom = format_bytes(budget.bytes), budget.headroom_bytes
    less = f" ({budget.asked} less {format_bytes(headroom)} of --headroom)" if headroom else ""
    needed = max(smallest_peak, measured_peak)
    predicted = f" as measured, {format_bytes(smallest_peak)} as predicted" if measured_peak > smallest_peak else ""
    left = budget.bytes + headroom - needed
    but = f", which fits with --headroom of at most {format_bytes(left)}" if headroom and left >= 0 else ""
    return InfeasibleError(
        f"nothing fits {size}{less}{within}: the leanest plan needs {format_bytes(needed)}{predicted}{but}\n"
        f"{profiled.needs(needed)}",
        remedy=f"Raise the budget{wider}, or {SMALLER_JOB}.",
        smallest_peak=needed,
    )


def out_of_memory(error: DeviceOutOfMemory, smallest_peak: int) -> InfeasibleError:
    """The error for a device that the leanest plan runs out of memory on."""
    return InfeasibleError(
        f"the leanest plan does not run on this device: {error.message}",
        remedy=f"{SMALLER_JOB.capitalize()}.",
        smallest_peak=smallest_peak,
    )


@contextmanager
def naming_alternatives(
    found: Traced,
    needs: Callable[[Graph], int],
    clock: Clock,
    request: SearchRequest | None = None,
    what_if: Callable[[], WhatIf] | None = None,
) -> Iterator[None]:
    """A budget that nothing fits is said with what would fit: changes of the job, or chunks of its output head.

    Changes are looked for where the budget is no share of the job's own peak, and where ``request`` says how the job is
    made and ``what_if`` how variants of it are judged: a live model has none. ``needs``: bytes that ghost runs take.
    """
    try:
        yield
    except InfeasibleError as error:
        if request is not None and what_if is not None and request.budget.kind in ("bytes", "auto"):
            with clock.stage("look for alternatives"):
                uniform = found.uniform
                if found.twin is not None:  # of the whole model
                    kinds = [kind for kind in ("recompute", "save") if kind in uniform]
                    uniform = uniform_graphs(found.tracer, blocks_of(found.tracer), kinds)
                chunked = request.allow_inexact
                ways = alternatives(request.workload, found.tracer.settings, uniform, what_if(), chunked=chunked)
            raise with_alternatives(error, ways) from None
        if request is not None and (request.allow_inexact or request.hardware is not None):
            raise
        raise in_chunks(error, found, needs) from None


def alternatives(
    spec: WorkloadSpec, settings: Mapping[str, Any], base: UniformRuns, bench: WhatIf, *, chunked: bool = False
) -> tuple[WayOut, ...]:
    """The cheapest ways to make a job fit, at most three: on one device first, fewest simulated seconds per token.

    Where no single change helps, changes are combined; shorter sequences come last, for they are another job.

    ``settings`` are the resolved ones of the job, ``base`` the ghost runs of its uniform plans. ``chunked``: its head
    runs in chunks already. Empty where nothing that is tried fits. Variants that cannot be built are left out.
    """
    leanest = min(predictions(bench, base).values(), key=lambda p: p.peak_bytes)
    standard = (leanest.step_seconds or 0.0) / _work(settings)
    found = []
    held = next(graph.resident for _, graph in base.values())
    lighter = held.get("weights", 0) + held.get("optimizer states", 0) > bench.budget_bytes
    for family in _families(spec, settings, chunked, simulated=bench.hardware is not None, lighter=lighter):
        if (way := _mildest(family, bench, standard)) is not None:
            found.append(way)
    if not any(SHARD not in way.options for way in found):
        combined = _combined(spec, settings, chunked, simulated=bench.hardware is not None, lighter=lighter)
        found += [way for way in (_mildest(family, bench, standard) for family in combined) if way is not None][:1]
    if not any(SHARD not in way.options for way in found):  # the last resort
        shorter = () if lighter else (_shorter_sequences(spec, settings),)
        together = _together(spec, settings, simulated=bench.hardware is not None and not found)
        resorts = [*((family, False) for family in shorter), (together, True)]
        ways = (_mildest(family, bench, standard, hopeful=hopeful) for family, hopeful in resorts)
        found += [way for way in ways if way is not None]
    return tuple(sorted(found, key=lambda way: (SHARD in way.options, way.relative_cost))[:MOST])


def in_chunks(error: InfeasibleError, found: Traced, needs: Callable[[Graph], int]) -> InfeasibleError:
    """The same error; its remedy names inexact choices where a ghost run shows that they lower the smallest peak."""
    tracer = found.tracer
    if tracer.head is None:
        return error
    choices, graph = min(found.uniform.values(), key=lambda pair: pair[1].peak_bytes)
    chunked = tracer.trace({**choices, tracer.head.name: ChunkedLoss(tokens=CHUNKS[0])})
    if chunked.peak_bytes >= graph.peak_bytes * (1 - WORTH):
        return error
    remedy = (
        f"{error.remedy} Or add --allow-inexact: with `{tracer.head.name}: chunked_loss` the leanest plan needs "
        f"{format_bytes(needs(chunked))}, with gradients equal up to rounding."
    )
    return InfeasibleError(error.message, remedy=remedy, smallest_peak=error.smallest_peak)


def with_alternatives(error: InfeasibleError, ways: Sequence[WayOut]) -> InfeasibleError:
    """The same error; its remedy ends with the alternatives."""
    if not ways:
        return error
    lines = ["Cheapest alternatives, each ghost-run with one choice on all layers; simulated, not measured:"]
    lines += [describe(way) for way in ways]
    return InfeasibleError(error.message, remedy="\n".join(lines), smallest_peak=error.smallest_peak, ways=ways)


def describe(way: WayOut) -> str:
    """One line for people."""
    step = f", {way.step_seconds:.3g} s a step" if way.step_seconds is not None else ""
    about = "" if way.step_seconds is not None else "about "
    return (
        f"{way.options}  simulated peak {format_bytes(way.peak_bytes)} with {way.plan}{step}, "
        f"{about}{way.relative_cost:.2f} times the seconds per token of the leanest plan ({way.effect})"
    )


def _families(
    spec: WorkloadSpec, settings: Mapping[str, Any], chunked: bool, simulated: bool, lighter: bool
) -> Iterator[Iterator[Change]]:
    """Changes of one sort each, the mildest first; ``lighter``: only those by which weights or their states shrink."""
    if not lighter:
        yield _smaller_batches(spec, settings)
    if not (chunked or lighter):
        yield iter([_in_chunks(Change(spec, "", ""))])
    if spec.lora is None:
        yield iter([_with_lora(spec)])
    yield _lean_optimizers(spec, simulated)
    if simulated:
        yield _sharded(spec)


def _combined(
    spec: WorkloadSpec, settings: Mapping[str, Any], chunked: bool, simulated: bool, lighter: bool
) -> Iterator[Iterator[Change]]:
    """Two changes and three, those that change training least first; sequences stay as long as they are."""
    batches = list(_smaller_batches(spec, settings))
    fewest = batches[-1] if batches else Change(spec, "", "")
    if batches and not lighter:
        yield map(_in_chunks, batches)
    others = list(_lean_optimizers(spec, simulated))[:1] + ([_with_lora(spec)] if spec.lora is None else [])
    for other in others:
        update = {"optimizer": other.spec.optimizer, "lora": other.spec.lora}
        both = Change(
            fewest.spec.model_copy(update=update),
            f"{fewest.options} {other.options}".strip(),
            "; ".join(filter(None, (fewest.effect, other.effect))),
        )
        if batches:
            yield iter([both])
        if not chunked:
            yield iter([_in_chunks(both)])


def _in_chunks(change: Change) -> Change:
    """The same with head and loss in chunks."""
    effect = "; ".join(filter(None, (change.effect, _CHUNKS)))
    return Change(change.spec, f"{change.options} --allow-inexact".strip(), effect, True)


def _smaller_batches(spec: WorkloadSpec, settings: Mapping[str, Any]) -> Iterator[Change]:
    rows = settings.get("batch_size")
    if not isinstance(rows, int):
        return
    for fewer in range(rows // 2, 0, -1):
        if rows % fewer:
            continue
        accumulate = spec.accumulate * (rows // fewer)
        yield Change(
            spec.model_copy(update={"batch_size": fewer, "accumulate": accumulate}),
            f"--batch-size {fewer} --accumulate {accumulate}",
            "the same rows in every optimizer step",
        )


def _shorter_sequences(spec: WorkloadSpec, settings: Mapping[str, Any]) -> Iterator[Change]:
    length = settings.get("seq_len")
    while isinstance(length, int) and length // 2 >= SHORTEST:
        length //= 2
        yield Change(
            spec.model_copy(update={"seq_len": length, "pad_to": None}), f"--seq-len {length}", "shorter sequences"
        )


def _with_lora(spec: WorkloadSpec) -> Change:
    return Change(spec.model_copy(update={"lora": LORA_RANK}), f"--lora {LORA_RANK}", "adapters only are trained")


def _sharded(spec: WorkloadSpec, options: str = "", effect: str = "") -> Iterator[Change]:
    """Over more and more devices, each with rows of its own."""
    ranks = 2 * (spec.shard or 1)
    while ranks <= MOST_RANKS:
        said = f"weights, gradients and optimizer states shared by {ranks} devices; what these send is not counted"
        yield Change(
            spec.model_copy(update={"shard": ranks}),
            f"{options} {SHARD} {ranks}".strip(),
            "; ".join(filter(None, (effect, said))),
        )
        ranks *= 2


def _lean_optimizers(spec: WorkloadSpec, simulated: bool) -> Iterator[Change]:
    """Optimizers with fewer states: 8-bit ones, which take a library and CUDA to run, before SGD."""
    names = [name for name in get_args(OptimizerName) if name not in (spec.optimizer, "none")]
    lean = [name for name in names if "8bit" in name and simulated] + [name for name in names if name == "sgd"]
    for name in lean if spec.optimizer not in ("none", "sgd") else []:
        states = "no optimizer states" if name == "sgd" else "optimizer states in 8 bits"
        yield Change(spec.model_copy(update={"optimizer": name}), f"--optimizer {name}", f"{states}; other training")


def _together(spec: WorkloadSpec, settings: Mapping[str, Any], simulated: bool) -> Iterator[Change]:
    """All at once, for jobs that no single change helps: single rows, adapters, shorter and shorter, more devices."""
    smallest = list(_smaller_batches(spec, settings))[-1:]
    start = smallest[0] if smallest else Change(spec, "", "")
    if spec.lora is None:
        lora = _with_lora(start.spec)
        start = Change(lora.spec, f"{start.options} {lora.options}".strip(), lora.effect)
        yield start
    for shorter in _shorter_sequences(start.spec, settings):
        effect = "; ".join(filter(None, (start.effect, shorter.effect)))
        yield Change(shorter.spec, f"{start.options} {shorter.options}".strip(), effect)
    if simulated:
        yield from _sharded(start.spec, start.options, start.effect)


def _mildest(changes: Iterator[Change], bench: WhatIf, standard: float, hopeful: bool = False) -> WayOut | None:
    """The first change that fits, where all behind one that fits do; None where none does, or this sort of change is
    not possible for this model. ``hopeful``: the very first is likely to, and tried before all others."""
    with ExitStack() as stack:
        series = [_Variant(change, bench, stack) for change in changes]
        try:
            if hopeful and series and series[0].fits:
                return series[0].way(standard)
            if not series or not series[-1].fits:
                return None
            return series[bisect_left(series, True, key=lambda variant: variant.fits)].way(standard)
        except AutockptError:
            return None


class _Variant:
    """A change, ghost-run as far as it was asked about, with few micro-steps a cycle: the second is like all after it.

    Its tracers are closed with ``stack``.
    """

    def __init__(self, change: Change, bench: WhatIf, stack: ExitStack) -> None:
        self._change, self._bench, self._stack = change, bench, stack
        self._uniform: dict[str, tuple[dict[str, Choice], Graph]] = {}  # as ``uniform_graphs`` gives them
        self._short = change.spec.model_copy(update={"accumulate": min(change.spec.accumulate, MICRO_STEPS)})

    @cached_property
    def _tracer(self) -> Tracer:
        return self._stack.enter_context(self._bench.tracer(self._short))

    @cached_property
    def fits(self) -> bool:
        """Whether the same choice on every layer makes it fit, of which the leanest kinds are asked."""
        if self._change.chunked and self._tracer.head is None:
            return False
        if _ignored(self._change.spec, self._tracer.settings):
            return False
        lean = [kind for kind in LEAN_KINDS if kind in self._bench.kinds] or list(self._bench.kinds)
        for kind in filter(self._run, lean):
            choices, graph = self._uniform[kind]
            if graph.resident_bytes > self._bench.budget_bytes:  # whatever the layers do
                return False
            if _fitting(self._bench, {kind: (choices, graph)}):
                return True
        return False

    def way(self, standard: float) -> WayOut | None:
        """The change with the fastest uniform plan that fits, all micro-steps; ``standard``: seconds per token."""
        for kind in self._bench.kinds:
            self._run(kind)
        fitting = _fitting(self._bench, self._uniform)
        tracer = self._tracer
        if self._short != self._change.spec:
            tracer = self._stack.enter_context(self._bench.tracer(self._change.spec))
        for kind in sorted(fitting, key=lambda kind: fitting[kind].step_seconds or 0.0):
            if tracer is not self._tracer:
                choices, _ = self._uniform[kind]
                whole = _fitting(self._bench, {kind: (choices, tracer.trace(choices))})
                if kind not in whole:
                    continue
                fitting[kind] = whole[kind]
            return self._described(kind, fitting[kind], _work(tracer.settings), standard)
        return None

    def _described(self, kind: str, best: Prediction, work: float, standard: float) -> WayOut:
        return WayOut(
            options=self._change.options,
            effect=self._change.effect,
            plan=f"every layer on {kind}",
            peak_bytes=best.peak_bytes,
            step_seconds=best.step_seconds if self._bench.seconds else None,
            relative_cost=(best.step_seconds or 0.0) / work / standard if standard else 1.0,
        )

    @property
    def _besides(self) -> dict[str, Choice]:
        """What the output head does."""
        head = self._tracer.head
        return {head.name: CHUNKED_LOSS} if self._change.chunked and head is not None else {}

    def _run(self, kind: str) -> bool:
        """Ghost-run a choice on every layer, once; whether it can be attached."""
        if kind not in self._uniform:
            try:
                self._uniform |= uniform_graphs(self._tracer, blocks_of(self._tracer), (kind,), self._besides)
            except ConflictError:
                return False
        return True


def _fitting(bench: WhatIf, uniform: UniformRuns) -> dict[str, Prediction]:
    return {kind: p for kind, p in predictions(bench, uniform).items() if p.peak_bytes <= bench.budget_bytes}


def predictions(bench: WhatIf, uniform: UniformRuns) -> dict[str, Prediction]:
    """What each choice on every layer would come to, by kind."""
    graphs = {plan_hash(choices): graph for choices, graph in uniform.values()}
    judge = Predictor(lambda choices: graphs[plan_hash(choices)], bench.times([*graphs.values()]), needs=bench.needs)
    return {kind: judge.predict(choices) for kind, (choices, _) in uniform.items()}


def _ignored(spec: WorkloadSpec, settings: Mapping[str, Any]) -> bool:
    """Whether the user's own function made something else than what was asked for."""
    asked = {"batch_size": spec.batch_size, "seq_len": spec.seq_len}
    return any(value is not None and settings.get(name) not in (None, value) for name, value in asked.items())


def _work(settings: Mapping[str, Any]) -> float:
    """Tokens of one cycle, or its rows."""
    tokens = settings.get("tokens")
    return float(tokens or (settings.get("batch_size") or 1) * (settings.get("accumulate") or 1))
