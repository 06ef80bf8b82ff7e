"""Whether a live step fits its own device at other batch sizes and sequence lengths, with what plan and how fast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from autockpt.analysis.build import explain
from autockpt.analysis.subject import ExplainRequest
from autockpt.errors import AutockptError
from autockpt.schema import SAVE, Estimate, Silence, parse_budget
from autockpt.tuning.estimates import remark
from autockpt.workload import Step


def estimate_step(
    step: Step, batch_sizes: Sequence[int] | None = None, seq_lens: Sequence[int] | None = None
) -> Iterator[Estimate]:
    """One answer for each size, the step's own where None is given; its batch is cut or repeated.

    By ghost runs on the device of the step's model, of which a plan may use all. Seconds are known where a search
    timed this step's ops before. A size that cannot be had says why in ``note``.
    """
    asked = ExplainRequest(spec=None, step=step, budget=parse_budget("auto"), limits=False)
    rows = list[Estimate]()
    own = {name: step.settings.get(name) for name in ("batch_size", "seq_len")}
    for batch_size, seq_len in product(batch_sizes or [own["batch_size"]], seq_lens or [own["seq_len"]]):
        row = Estimate(
            model=asked.name,
            card=str(step.device),
            batch_size=batch_size if isinstance(batch_size, int) else None,
            seq_len=seq_len if isinstance(seq_len, int) else None,
            fits=False,
        )
        row = _answered(row, asked, own)
        row = row.model_copy(update={"remark": remark(row, rows)})
        rows.append(row)
        yield row


def _answered(row: Estimate, asked: ExplainRequest, own: Mapping[str, object]) -> Estimate:
    """What a search within all that the device has would find for this size, by ghost runs."""
    try:
        for name in own:
            size = getattr(row, name)
            if size is not None and size != own[name]:
                asked = asked.sized(name, size)
        said = explain(asked, Silence())
    except AutockptError as error:
        return row.model_copy(update={"note": error.message})
    chosen = Counter(choice.kind for choice in said.choices.values() if choice != SAVE)
    return row.model_copy(
        update={
            "card": said.device,
            "fits": said.fits,
            "peak_bytes": said.peak_bytes if said.fits else None,
            "step_seconds": said.speed.seconds if said.speed is not None and said.fits else None,
            "choices": dict(chosen) if said.fits else {},
            "smallest_peak": said.smallest_peak,
        }
    )
