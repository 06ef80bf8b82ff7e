"""Jobs of other sizes: other batches and lengths of the same training, and the largest that fits a budget.

A size fits where some uniform plan fits by its ghost run, so that a search can only do better. Nothing is measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from torch import Tensor

from autockpt.cost import MemoryModel, Predictor, UniformRuns, local_memory, simulated_memory, uniform_graphs
from autockpt.cost.profile import HeadRuns, head_graphs
from autockpt.cost.roofline import nominal_op_times, roofline_times
from autockpt.errors import AutockptError, ConflictError, InfeasibleError, UsageError
from autockpt.measuring.local import refuse_many_processes
from autockpt.policies.offload import MOVING
from autockpt.schema import (
    SAVE,
    Choice,
    Environment,
    Graph,
    Listener,
    OpTimes,
    Prediction,
    SearchRequest,
    Silence,
    WorkloadSpec,
    format_bytes,
)
from autockpt.schema.choices import CHUNKED_SOFTMAX, IN_TILES
from autockpt.tracing import Tracer
from autockpt.tuning.traced_model import LEANEST_CHUNKS, blocks_of, kinds_of, local_device, tracer_of
from autockpt.workload import Step, cut_tensors, nested_tensors
from autockpt.workload.lengths import with_length

LEAN_KINDS = (*IN_TILES, "recompute_offload", "offload", "recompute")
"""Choices that are tried first: one of them is nearly always the leanest."""
FAR_OVER = 2  # times the budget: where one of these needs that much, no other choice fits either
MOST_TIMES = 64  # times the present length is the longest that is tried
GRAIN = 32  # sequences are distinguished to a share of 1/32, in powers of two


def job_of(request: SearchRequest, **sizes: int | None) -> SearchRequest:
    """The request with its training step ``resized``."""
    trained = "step" if request.workload is None else "workload"
    return request.model_copy(update={trained: resized(getattr(request, trained), **sizes)})


def resized(trained: WorkloadSpec | Step, **sizes: int | None) -> WorkloadSpec | Step:
    """The training step with another ``batch_size``, ``accumulate`` or ``seq_len``. A live batch is cut, or repeated.

    That is the same step for bytes and seconds, not the same training. Raises UsageError for a batch without such a
    dimension.
    """
    if isinstance(trained, WorkloadSpec):
        if (prompt := trained.grpo_prompt_len) is not None and (tokens := sizes.get("seq_len")) is not None:
            sizes["grpo_prompt_len"] = min(prompt, tokens - 1)  # at least one token is the completion
        return trained.model_copy(update=sizes)
    step = trained
    if (tokens := sizes.get("seq_len")) is not None:
        step = with_length(step, tokens)
    if (rows := sizes.get("batch_size")) is not None:
        step = _with_rows(step, rows, sizes.get("accumulate") or step.accumulate)
    return step


def _with_rows(step: Step, rows: int, accumulate: int) -> Step:
    """The step with micro-batches of ``rows``: the first ones of its batch, repeated where that has fewer."""
    lengths = {tensor.shape[0] for tensor in nested_tensors(step.batch) if tensor.dim()}
    if step.full_step is not None or len(lengths) != 1 or not (have := lengths.pop()):
        raise UsageError(
            "this batch cannot be divided into rows: its tensors do not all begin with as many of them, or the step is "
            "a full_step of its own",
            remedy="Give autockpt.Step(model, batch) whose tensors are (rows, …), or keep the batch as it is.",
        )

    def taken(tensor: Tensor) -> Tensor:
        if not tensor.dim() or rows == have:
            return tensor
        more = tensor if rows <= have else tensor.repeat(-(-rows // have), *[1] * (tensor.dim() - 1))
        return more[:rows]

    return step.with_batch(cut_tensors(step.batch, taken), accumulate)


@dataclass(frozen=True)
class WhatIf:
    """How variants of a job are judged: by a budget in bytes, and by op times of the device that they would run on.

    ``kinds`` are the allowed choices, ``memory`` gives the memory of a ghost run where that is more than its tensors.
    ``late`` tells when to stop. ``head`` is the choice of the output head unless it runs in chunks with the loss.
    ``listener`` is notified of each kind of change.
    """

    budget_bytes: int
    times: Callable[[Sequence[Graph]], OpTimes]
    kinds: tuple[str, ...]
    memory: MemoryModel | None
    late: Callable[[], bool] = lambda: False
    head: Choice = SAVE
    listener: Listener = field(default_factory=Silence)


def what_if_of(
    request: SearchRequest,
    kinds: Collection[str],
    environment: Environment | None = None,
    used_by_others: int = 0,
) -> WhatIf:
    """Variants of the job on its hardware; or on the local device, within what others leave of it, at nominal rates.

    ``environment`` and ``used_by_others`` are of the local device, as the measuring process sees them.
    """
    if (hardware := request.hardware) is not None:
        budget_bytes = min(request.budget.resolved(0, 0, hardware.memory_bytes).bytes, hardware.memory_bytes)
        memory, times = simulated_memory(hardware, budget_bytes), partial(roofline_times, hardware)
        allowed = tuple(kind for kind in kinds if not (hardware.unified_memory and kind in MOVING))  # frees nothing
        return WhatIf(budget_bytes, times, allowed, memory)
    if environment is None:
        environment, used_by_others = local_device(request)
    room = environment.device.capacity_bytes - used_by_others
    budget_bytes, times = min(request.budget.resolved(0, 0, room).bytes, room), partial(nominal_op_times, environment)
    return WhatIf(budget_bytes, times, tuple(kinds), local_memory(environment, budget_bytes))


def leanest_head(heads: HeadRuns) -> Choice:
    """The choice of the output head in all variants: the leanest that was ghost-run."""
    return next((choice for choice in (LEANEST_CHUNKS, CHUNKED_SOFTMAX) if choice in heads), SAVE)


def predictions(what_if: WhatIf, uniform: UniformRuns) -> dict[str, Prediction]:
    """The predictions of uniform plans, by kind."""
    judge = Predictor(None, what_if.times([graph for _, graph in uniform.values()]), memory=what_if.memory)
    return {kind: judge.learn(choices, graph) for kind, (choices, graph) in uniform.items()}


class Variant:
    """A job of another size or kind, whose uniform plans are ghost-run on demand. ``stack`` closes its tracer.

    ``chunked``: its output head and loss run in chunks.
    """

    def __init__(self, job: SearchRequest, what_if: WhatIf, stack: ExitStack, *, chunked: bool = False) -> None:
        self._job, self._what_if, self._stack, self._chunked = job, what_if, stack, chunked
        self._known: dict[str, Prediction | None] = {}  # by kind of choice; None: it cannot be attached
        self._resident_bytes = 0

    @cached_property
    def tracer(self) -> Tracer:
        return self._stack.enter_context(tracer_of(self._job, fallback=False))

    def least_bytes(self, kinds: Sequence[str] = LEAN_KINDS) -> float:
        """Peak of the leanest of these choices, or of the first that fits; infinite for an impossible variant."""
        budget_bytes, least = self._what_if.budget_bytes, math.inf
        if self._what_if.late() or (self._chunked and self.tracer.head is None) or self._ignored:
            return math.inf
        asked = [kind for kind in kinds if kind in self._what_if.kinds] or list(self._what_if.kinds)
        for kind in asked:
            least = min([least, *(predicted.peak_bytes for predicted in self.predicted([kind]).values())])
            # it fits; or resident bytes alone do not; or it is so far off that no other choice is lean enough
            if least <= budget_bytes or max(self._resident_bytes, least // FAR_OVER) > budget_bytes:
                break
        return least

    def predicted(self, kinds: Sequence[str]) -> dict[str, Prediction]:
        """The predictions of uniform plans by kind, without those that cannot be attached. Of several kinds none is
        known where only ``save`` can be: ask for that by itself."""
        if new := [kind for kind in kinds if kind not in self._known]:
            uniform: UniformRuns = {}
            with suppress(ConflictError):
                uniform = uniform_graphs(self.tracer, blocks_of(self.tracer), new, self.besides)
            self._resident_bytes = max(
                (graph.resident_bytes for _, graph in uniform.values()), default=self._resident_bytes
            )
            self._known |= dict.fromkeys(new) | (predictions(self._what_if, uniform) if uniform else {})
        return {kind: prediction for kind in kinds if (prediction := self._known[kind]) is not None}

    @property
    def besides(self) -> dict[str, Choice]:
        """The choice of the output head, if any."""
        head, choice = self.tracer.head, LEANEST_CHUNKS if self._chunked else self._what_if.head
        return {head.name: choice} if head is not None and choice != SAVE else {}

    @property
    def _ignored(self) -> bool:
        """Whether the user's factory built another size than it was asked for."""
        spec, settings = self._job.workload, self.tracer.settings
        asked = {} if spec is None else {"batch_size": spec.batch_size, "seq_len": spec.seq_len}
        return any(size is not None and settings.get(name) not in (None, size) for name, size in asked.items())


def least_bytes(job: Callable[[int], SearchRequest], what_if: WhatIf, kinds: Sequence[str], size: int) -> float:
    """``Variant.least_bytes`` of the job of a size."""
    with ExitStack() as stack:
        return Variant(job(size), what_if, stack).least_bytes(kinds)


def largest_that_fits(
    sizes: Sequence[int], needed: Callable[[int], float], budget_bytes: float, first: int | None = None
) -> int | None:
    """The largest of the ascending ``sizes`` that needs no more than the budget; None where even the smallest needs
    more.

    ``first`` is tried first (default: the smallest). Memory grows about linearly with size. So the next size is where
    the line through the two nearest known ones meets the budget; every third time, and where a size is impossible
    (infinite bytes), it is the one halfway.
    """
    low, high = -1, len(sizes)  # indices: ``low`` fits, ``high`` does not
    at, known = 0 if first is None else bisect_left(sizes, first), dict[int, float]()
    while high - low > 1:
        at = min(max(at, low + 1), high - 1)
        known[sizes[at]] = needed(sizes[at])
        low, high = (at, high) if known[sizes[at]] <= budget_bytes else (low, at)
        at = (low + high) // 2
        unbuilt = high < len(sizes) and known[sizes[high]] == math.inf
        if len(known) % 3 and not unbuilt and (aim := _on_the_line(known, budget_bytes)) < math.inf:
            at = bisect_right(sizes, aim) - 1
    return sizes[low] if low >= 0 else None


def _on_the_line(known: Mapping[int, float], budget_bytes: float) -> float:
    """The size at which the line through the two known sizes next to the budget meets it; infinite for a level line."""
    points = sorted((size, nbytes) for size, nbytes in known.items() if nbytes < math.inf)
    points = points if len(points) > 1 else [(0, 0.0), *points]
    fitting = sum(nbytes <= budget_bytes for _, nbytes in points)
    (near, low), (far, high) = points[min(max(fitting, 1), len(points) - 1) - 1 :][:2]
    return near + (budget_bytes - low) * (far - near) / (high - low) if high > low else math.inf


def with_longest(request: SearchRequest, listener: Listener) -> SearchRequest:
    """The request with the longest sequences with which a uniform plan fits its budget, and a note on them.

    Lengths are distinguished to about a share of 1/32. Raises UsageError for a budget that is a share of the job's own
    peak, for models without sequences and under a distributed launch, InfeasibleError where not even the shortest fits.
    """
    refuse_many_processes()
    request.budget.refuse_share("grows with its sequences")
    listener.stage("look for the longest sequences that fit")
    heads = [LEANEST_CHUNKS] if request.allow_inexact else []
    heads += [CHUNKED_SOFTMAX] if CHUNKED_SOFTMAX.kind in request.space.head else []
    what_if = what_if_of(request, kinds_of(request.space, request.allow_inexact))
    with tracer_of(request, fallback=False) as tracer:
        now = tracer.settings.get("seq_len") or tracer.settings.get("asked_seq_len")
        what_if = replace(what_if, head=leanest_head(head_graphs(tracer, tracer.head, heads)))
    if not isinstance(now, int):
        raise UsageError(
            "this workload has no sequence length that could be found",
            remedy="Leave --seq-len auto out; a function of your own needs a parameter seq_len with a default.",
        )
    sizes, size = {now}, 1
    while size <= now * MOST_TIMES:
        sizes.add(size)
        size += 1 << max(0, (size // GRAIN).bit_length() - 1)  # distinguished by a power of two tokens
    peaks, refused = dict[int, float](), dict[int, str]()

    def needed(tokens: int) -> float:
        try:
            peaks[tokens] = least_bytes(lambda size: job_of(request, seq_len=size), what_if, LEAN_KINDS, tokens)
        except AutockptError as error:
            peaks[tokens], refused[tokens] = math.inf, error.message.splitlines()[0]
        if peaks[tokens] == math.inf:
            refused.setdefault(tokens, "the workload takes no other sequence length")
        return peaks[tokens]

    ordered = sorted(sizes)
    longest = largest_that_fits(ordered, needed, what_if.budget_bytes, now)
    beyond = ordered[bisect_right(ordered, longest or 0) :]
    why = refused.get(beyond[0], "") if beyond else f"{longest} was as far as was tried"
    if longest is None and why:
        raise UsageError(f"other sequence lengths cannot be asked for: {why}", remedy="Leave --seq-len auto out.")
    if longest is None:
        raise InfeasibleError(
            f"not even the shortest sequences fit {request.budget.text}",
            remedy="Give a larger budget or a smaller batch.",
        )
    note = (
        f"the longest sequences that fit with the leanest plan: {longest:,} tokens, simulated peak "
        f"{format_bytes(int(peaks[longest]))}{f' ({why})' if why else ''}"
    )
    listener.note(note)
    return job_of(request, seq_len=longest).model_copy(update={"longest": False, "notes": (*request.notes, note)})
