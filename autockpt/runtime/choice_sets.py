"""Several sets of choices on one model: at each forward the batch that comes in says which one acts.

Every set is a session of its own, attached once and then removed and reattached as a whole. A recomputation restores
the set that the forward ran under, and afterwards the one that acted. Nothing else of a backward asks which one does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from autockpt.checkpointing.divergence import DivergenceCheck, sentinels_of
from autockpt.checkpointing.divergence import Mode as SentinelMode
from autockpt.checkpointing.replay_context import one_at_a_time
from autockpt.devices.transport import OffloadTransports, Transports
from autockpt.policies.base import ForwardListener
from autockpt.policies.compiling import eagerly
from autockpt.runtime.adaptive import Adaptive
from autockpt.runtime.session import Session, attach_units, look_after
from autockpt.schema.choices import Choice
from autockpt.schema.plan import When
from autockpt.schema.sizes import format_binary
from autockpt.schema.words import counted

SHOWN = 5  # moves
# Copies and pickles begin again, and go by the batch alone: counters of a device do not distinguish models.
_OF_THIS_PROCESS = ("adaptive", "_group", "_is_prepared")
_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")
_FIRST = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values")
_PACKED = ("max_length_q", "max_seqlen_q", "max_seqlen")


class BatchSize(NamedTuple):
    """Tokens of a batch, padding included, and its longest sequence. Of images rows × height × width."""

    tokens: int
    longest: int


def batch_size(module: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any]) -> BatchSize | None:
    """How large a batch is, by the arguments of the model's forward; None where they hold no tensor with rows.

    Ids are rows × length, embeddings rows × length × width, images rows × channels × height × width. Of an encoder
    and a decoder the larger counts. Of packed sequences the longest is what an argument says that attention goes
    by (``max_length_q``), else the whole row.
    """
    values = (*map(kwargs.get, _FIRST), *args, *kwargs.values())
    first = next((v for v in values if isinstance(v, Tensor) and v.dim() > 0), None)
    if first is None:
        return None
    size = _size_of(first)
    decoder = next((kwargs[name] for name in _DECODER if isinstance(kwargs.get(name), Tensor)), None)
    if decoder is None and getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        decoder = kwargs.get("labels")
    if isinstance(decoder, Tensor) and decoder.dim() > 1:
        size = max(size, _size_of(decoder))
    packed = next((kwargs[name] for name in _PACKED if isinstance(kwargs.get(name), int)), None)
    return size if packed is None else BatchSize(size.tokens, packed)


def _size_of(tensor: Tensor) -> BatchSize:
    if tensor.dim() >= 4:
        rows, places = tensor.shape[0], tensor.shape[-2] * tensor.shape[-1]
        return BatchSize(rows * places, places)
    length = tensor.shape[1] if tensor.dim() > 1 else 1
    return BatchSize(tensor.shape[0] * length, length)


class BatchSets(Session):
    """The session of a model with several sets, each of which is one, and which of them acts.

    ``bounds`` say which batches a set is for, by set, the smallest batches first (None: all); a batch that no bound
    covers takes the last of these. Sessions beyond are leaner ones, which only ``adaptive`` takes, where there is one.
    ``used`` counts forwards by set.
    """

    def __init__(self, transports: Transports, sentinels: DivergenceCheck, bounds: Sequence[When | None]) -> None:
        super().__init__(transports, sentinels)
        self.sessions, self.bounds = list[Session](), list(bounds)
        self.used = Counter[int]()
        self.acting = len(self.bounds) - 1

    adaptive: Adaptive | None = None
    _group: Any = None  # once a forward has begun: the ranks that go by one set, or False where each goes by its own
    _is_prepared = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_PROCESS}

    @partial(
        eagerly,
        reason="autockpt chooses among a plan's sets of choices by the batch at hand, which cannot be part of one "
        "graph. Compile layers instead of the whole model, or without fullgraph=True.",
    )
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ForwardListener]:
        """A forward of the whole model begins: choose its set, and return that set's listeners."""
        if not self._is_prepared:
            self._is_prepared = True
            for number, session in enumerate(self.sessions):
                for _, forward in session.placed:
                    forward.state.restored_set = partial(self._restored_set, number)
        size = batch_size(module, args, kwargs)
        tokens = 1 if size is None else max(1, size.tokens)
        chosen, promised = self._for(size)
        if self.adaptive is not None:
            chosen = self.adaptive.choose(chosen, tokens, promised)
        chosen = self._agreed(module, chosen)
        if self.adaptive is not None:
            self.adaptive.runs(chosen, tokens)
        self.used[chosen] += 1
        with one_at_a_time("the model"):
            self._act(chosen)
        return self.sessions[chosen].listeners

    @contextmanager
    def _restored_set(self, number: int) -> Iterator[None]:
        """Have a set act while something of it is recomputed. What that is in the middle of, a forward or another
        recomputation, goes on by the set that it began with. One thread at a time recomputes (``one_at_a_time``)."""
        before = self.acting
        self._act(number)
        try:
            yield
        finally:
            self._act(before)

    def _for(self, size: BatchSize | None) -> tuple[int, bool]:
        """The first set that is for batches of this size, and whether a bound says so; the last, which needs
        the least memory, where none is."""
        for number, bound in enumerate(self.bounds):
            if bound is None or (size is not None and bound.covers(*size)):
                return number, bound is not None
        what = f"{size.tokens:,} tokens" if size is not None else "unknown size"
        if size is not None and size.longest and self.bounds[-1] is not None and self.bounds[-1].longest:
            what += f", sequences up to {size.longest:,}"
        self.guard.warn_once(
            f"the plan has no choices for a batch of {what} (up to {self.bounds[-1]}): it takes the leanest, and the "
            "plan's promise about memory does not hold for it. Search again with its length."
        )
        return len(self.bounds) - 1, False

    def _act(self, number: int) -> None:
        if number != self.acting and self.guard.active:  # unless the plan was taken off in between
            self.sessions[self.acting].remove()
            self.acting = -1  # none of them, where this one cannot be reattached
            if number >= 0:
                self.sessions[number].reattach()
                self.acting = number

    def _agreed(self, module: nn.Module, number: int) -> int:
        """The leanest set that any rank wants, where what units do again asks other ranks to take part.

        That is so where weights are sharded (FSDP2, FSDP1, tensor parallelism), as running a unit again may gather them
        again. Under DDP every rank goes by its own batch. The ranks meet by way of the CPU: no device has to wait.
        """
        if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
            return number
        if self._group is None:
            self._group = is_sharded(module) and distributed.new_group(backend="gloo")
        if self._group is False:
            return number
        wanted = torch.tensor(number, device="cpu")  # whatever the default device is
        distributed.all_reduce(wanted, distributed.ReduceOp.MAX, group=self._group)
        return int(wanted)

    # -- what a session tells ------------------------------------------------------------------------------------------

    @property
    def attached(self) -> dict[str, str]:
        """That of the set for the largest batches."""
        return self.sessions[len(self.bounds) - 1].attached

    def describe(self, indent: str = "  ") -> Iterator[str]:
        """A few lines for each set: for which batches, how many forwards went by it, what is attached."""
        for number, session in enumerate(self.sessions):
            last = number == len(self.bounds) - 1
            if number >= len(self.bounds):
                which = "where memory is short"
            elif (bound := self.bounds[number]) is not None:
                which = f"batches up to {bound}" + (", and larger" if last else "")
            else:
                which = "all other batches" if number else "all batches"
            yield f"  {which} ({counted(self.used[number], 'forward')} so far):"
            yield from session.describe("    ")
        if self.adaptive is not None:
            moves = self.adaptive.moves
            yield f"  adaptive within {format_binary(self.adaptive.limit)}: {counted(len(moves), 'move')} so far"
            yield from (f"    {move}" for move in moves[-SHOWN:])

    def remove(self) -> None:
        """Take every set off again; the model is as it was. Idempotent."""
        for session in self.sessions:
            session.remove()
        super().remove()
        if self.adaptive is not None:
            self.adaptive.remove()


def is_sharded(module: nn.Module) -> bool:
    """Whether a model's weights lie on several ranks in parts: FSDP, tensor parallelism."""
    kinds = {cls.__name__ for m in module.modules() for cls in type(m).__mro__}
    kinds |= {type(p).__name__ for p in module.parameters()}
    return bool(kinds & {"DTensor", "FSDPModule", "FullyShardedDataParallel"})


def attach_sets(
    model: nn.Module,
    sets: Sequence[tuple[When | None, Mapping[str, Choice]]],
    *,
    leaner: Sequence[Mapping[str, Choice]] = (),
    host_budget: int | None = None,
    sentinels: SentinelMode | None = None,
) -> BatchSets:
    """Attach several sets of choices, each for batches of its size, the smallest first; ``attach`` says the rest.

    ``leaner`` ones are for whatever ``adaptive`` decides. All of them together claim no more than ``host_budget``.
    """
    with ExitStack() as undo:
        bounds = [bound for bound, _ in sets]
        made = undo.enter_context(BatchSets(OffloadTransports(host_budget), sentinels_of(sentinels), bounds))
        for choices in (*(choices for _, choices in sets), *leaner):
            made.sessions.append(Session(made.transports, made.sentinels))
            attach_units(model, choices, made.sessions[-1])
            made.sessions[-1].remove()
        made.order = [unit for session in made.sessions for unit in session.order]
        look_after(model, made).sets = made
        made.sessions[made.acting].reattach()
        undo.pop_all()  # no error came, so it stays
    return made
