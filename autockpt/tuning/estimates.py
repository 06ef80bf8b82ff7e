"""``estimate``: simulate whether training fits a card, with what plan and how fast, for many sizes and methods."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, get_args

from autockpt.errors import AutockptError, InfeasibleError, UsageError
from autockpt.schema import SAVE, Estimate, Listener, SearchRequest, SearchSpace, Silence, WorkloadSpec, parse_budget
from autockpt.schema.workload import Dtype
from autockpt.shipped import load_hardware
from autockpt.tuning.job_sizes import job_of
from autockpt.tuning.search import run_search
from autockpt.tuning.traced_model import local_device
from autockpt.workload import Step
from autockpt.workload.configs import find_config
from autockpt.workload.factory import is_factory

CHOICES = ("save", "recompute", "offload", "recompute_offload", "chunked_softmax")
"""Choices for whole layers and the output head. ``search`` has finer ones, for which it takes longer."""


def estimate(
    models: str | Sequence[str],
    *,
    cards: str | Sequence[str] = ("rtx4090",),
    batch_sizes: Sequence[int] = (1,),
    seq_lens: Sequence[int] = (2048,),
    lora: int = 16,
    full: bool = True,
    qlora: bool = True,
    dtype: Dtype | None = None,
    watch: Callable[[str], AbstractContextManager[Listener]] = lambda subject: nullcontext(Silence()),
) -> Iterator[Estimate]:
    """One simulated answer after the other: for full training, for LoRA adapters of rank ``lora`` (0: none), and with
    ``qlora`` for these on a base in 4 bits, which needs bitsandbytes to be installed.

    Models are named as for ``search``, cards as for its ``hardware``. The weights are of ``dtype``, by default what the
    shape's file says (bf16, mostly), the optimizer is AdamW, and the budget is what the card has, less the headroom
    that a search leaves (5 %). Plans choose for whole layers, so that a row takes seconds: a search for the same
    question finds an equally fast plan or a faster one. Nothing is measured. ``watch`` opens the listener that sees the
    stages of one row; it is closed before the row is yielded. Raises, before the first row is begun,
    UsageError for an unknown card or type, WorkloadError for a model that cannot be found; a row that cannot be had
    says why in ``note``.
    """
    if dtype not in (None, *get_args(Dtype)):
        raise UsageError(f"--dtype {dtype} is not known", remedy=f"Write one of {', '.join(get_args(Dtype))}.")
    named = [models] if isinstance(models, str) else list(models)
    known = {card: load_hardware(card) for card in ([cards] if isinstance(cards, str) else cards)}
    if not known:
        raise UsageError("--cards names no device", remedy="Write --cards rtx4090,h100.")
    methods: list[tuple[int | None, bool]] = [(None, False)] * full
    methods += [(lora, False), *[(lora, True)] * qlora] if lora > 0 else []
    if not methods:
        raise UsageError(
            "neither full training nor adapters are to be estimated", remedy="Leave --no-full or --lora out."
        )
    for name in named:  # a misspelt name is an error, not a row
        if not is_factory(name):
            find_config(WorkloadSpec(model=name))
    space, budget = SearchSpace().restricted(CHOICES), parse_budget("auto").with_headroom(None, simulated=True)

    def rows() -> Iterator[Estimate]:
        earlier: dict[tuple[str, str, int | None, bool], list[Estimate]] = {}
        for model, card, batch, length, (rank, in_4bit) in product(named, known, batch_sizes, seq_lens, methods):
            asked: dict[str, Any] = {
                "model": model, "batch_size": batch, "seq_len": length, "lora": rank, "load_in_4bit": in_4bit
            }  # fmt: skip
            spec = WorkloadSpec(**asked, dtype=dtype)
            request = SearchRequest(budget=budget, workload=spec, space=space, hardware=known[card], alternatives=False)
            with watch(f"estimate {model}") as listener:
                row = _answered(Estimate(**asked, card=card, fits=False), request, listener)
            others = earlier.setdefault((model, card, rank, in_4bit), [])
            others.append(row.model_copy(update={"remark": remark(row, others)}))
            yield others[-1]

    return rows()


def remark(row: Estimate, others: Iterable[Estimate]) -> str:
    """Why a row needs less, or takes less time, than one of a smaller batch and length, or more than one of a larger.

    ``others`` are rows of the same model, card and way of training. Empty where all grow with batch and length.
    """
    for other in others:
        sizes, others_sizes = _sizes(row), _sizes(other)
        grows = all(a <= b for a, b in zip(others_sizes, sizes, strict=True))
        small, large = (other, row) if grows else (row, other)
        shrinks = any(a > b for a, b in zip(_sizes(small), _sizes(large), strict=True))
        if shrinks or row.note or other.note:
            continue
        bytes_shrink = (large.peak_bytes or large.smallest_peak or 0) < (small.peak_bytes or small.smallest_peak or 0)
        if not bytes_shrink and (large.step_seconds or math.inf) >= (small.step_seconds or 0.0):
            continue
        what = "needs" if bytes_shrink else "takes"
        why = "by how the allocator's memory divides" if bytes_shrink else "by the kernels of its size"
        if small.choices != large.choices:
            why = "with another plan" if small.fits and large.fits else "with the plan that fits there"
        return f"{what} {'less' if grows else 'more'} than {other.batch_size}×{other.seq_len}: {why}"
    return ""


def _sizes(row: Estimate) -> tuple[int, int]:
    return row.batch_size or 0, row.seq_len or 0


def estimate_step(
    step: Step, batch_sizes: Sequence[int] | None = None, seq_lens: Sequence[int] | None = None
) -> Iterator[Estimate]:
    """One answer for each size, the step's own where None is given; its batch is cut or repeated.

    By ghost runs on the device of the step's model, of which a plan may use all. Seconds are known where a search
    timed this step's ops before. A size that cannot be had says why in ``note``.
    """
    own = {name: step.settings.get(name) for name in ("batch_size", "seq_len")}
    request = SearchRequest(budget=parse_budget("auto"), step=step, simulate=True, alternatives=False)
    card = local_device(request)[0].device.name
    for sizes in product(batch_sizes or [own["batch_size"]], seq_lens or [own["seq_len"]]):
        wanted: dict[str, Any] = {n: s if isinstance(s, int) else None for n, s in zip(own, sizes, strict=True)}
        others = {name: size for name, size in wanted.items() if size not in (None, own[name])}
        row = Estimate(model=request.name, card=card, fits=False, **wanted)
        yield _answered(row, request, Silence(), **others)


def _answered(row: Estimate, request: SearchRequest, listener: Listener, **sizes: int | None) -> Estimate:
    """The row of a request, with the training step in other ``sizes``."""
    try:
        outcome = run_search(job_of(request, **sizes) if sizes else request, listener)
    except InfeasibleError as error:
        return row.model_copy(update={"smallest_peak": error.smallest_peak})
    except AutockptError as error:
        return row.model_copy(update={"note": str(error)})
    if outcome.interrupted:
        raise KeyboardInterrupt
    plan, predicted = outcome.plan, outcome.rows[-1].predicted
    assert plan is not None and predicted is not None
    chosen = Counter(choice.kind for choice in plan.expand_planned().values() if choice != SAVE)
    return row.model_copy(
        update={
            "fits": True,
            "seq_len": outcome.settings.get("seq_len") or outcome.settings.get("asked_seq_len"),  # images have none
            "peak_bytes": predicted.peak_bytes,
            "step_seconds": predicted.step_seconds,
            "choices": dict(chosen),
            "smallest_peak": outcome.smallest_peak,
            "step_note": outcome.step_note,
        }
    )
