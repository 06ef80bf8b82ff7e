"""Does it fit, with what plan, how fast: one simulated answer for each model, card, batch and way of training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autockpt.errors import AutockptError, InfeasibleError, python_door
from autockpt.schema import SAVE, Estimate, SearchRequest, Silence, WorkloadSpec, parse_budget
from autockpt.tuning.question import Clock
from autockpt.tuning.targets.simulated import foreseen
from search_spaces.hardware import load_hardware
from search_spaces.spaces import load_space

CHOICES = ("save", "recompute", "offload", "recompute_offload", "chunked_softmax")
"""Choices of whole layers, and of the output head. ``search`` has finer ones, which take it longer to weigh."""


@python_door
def estimate(
    models: str | Sequence[str],
    *,
    cards: Sequence[str] = ("rtx4090",),
    batch_sizes: Sequence[int] = (1,),
    seq_lens: Sequence[int] = (2048,),
    lora: int = 16,
    full: bool = True,
) -> Iterator[Estimate]:
    """One simulated answer after the other: for full training and for LoRA adapters of rank ``lora`` (0: none).

    Models are named as for ``search``, cards as for its ``hardware``. The weights are what the shape's file says
    (bf16, mostly), the optimizer is AdamW, and the budget is all that the card has. Plans choose for whole layers, so
    that a row takes seconds: a search for the same question finds an equally fast plan or a faster one. Nothing is
    measured. Raises UsageError for an unknown model or card; a row that cannot be had says why in ``note``.
    """
    named = [models] if isinstance(models, str) else list(models)
    known = [(card, load_hardware(card)) for card in cards]
    ways = [0] * full + [lora] * (lora > 0)
    space = load_space("knobs").restricted(CHOICES)
    for model in named:
        for card, hardware in known:
            for batch in batch_sizes:
                for length in seq_lens:
                    for rank in ways:
                        spec = WorkloadSpec(model=model, batch_size=batch, seq_len=length, lora=rank or None)
                        request = SearchRequest(
                            budget=parse_budget("auto"), workload=spec, space=space, hardware=hardware, dry_run=True
                        )
                        row = Estimate(
                            model=model, card=card, batch_size=batch, seq_len=length, lora=rank or None, fits=False
                        )
                        yield _answered(row, request)


def _answered(row: Estimate, request: SearchRequest) -> Estimate:
    assert request.hardware is not None
    try:
        outcome = foreseen(request, request.hardware, Clock(Silence()))
    except InfeasibleError as error:
        return row.model_copy(update={"smallest_peak": error.smallest_peak})
    except AutockptError as error:
        return row.model_copy(update={"note": error.message})
    plan, predicted = outcome.plan, outcome.rows[-1].predicted
    assert plan is not None and predicted is not None
    chosen = Counter(choice.kind for choice in plan.expand_planned().values() if choice != SAVE)
    return row.model_copy(
        update={
            "fits": True,
            "peak_bytes": predicted.peak_bytes,
            "step_seconds": predicted.step_seconds,
            "choices": dict(chosen),
            "smallest_peak": outcome.smallest_peak,
        }
    )
