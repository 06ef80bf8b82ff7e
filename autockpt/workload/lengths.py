"""Read the sequence lengths of a training from data or text, and cut a live batch to shorter sequences."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from numbers import Number
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from autockpt.devices.random_states import all_random_states_kept
from autockpt.errors import UsageError
from autockpt.schema.files import read_regular, reason
from autockpt.schema.lengths import Lengths
from autockpt.schema.workload import MOST
from autockpt.workload.step import Step
from autockpt.workload.storages import cut_tensors

_LINE = re.compile(r"([0-9]{1,9})(?:[\s:,;]+([0-9]{1,12}))?")
_BYTES = 200_000_000
ROWS, BATCHES, SECONDS = 50_000, 5_000, 120.0


def lengths_of(source: Any, *, seconds: float = SECONDS) -> Lengths:
    """The lengths of the sequences that training will see, however they are given.

    Text, ``Lengths``, counts by length and a length per row are taken as they are. Of a ``DataLoader`` (or any iterable
    of padded batches with ``input_ids`` of two dimensions) the padded lengths are counted, as its sampler makes them;
    of a data set, or a list of rows (mappings with ``input_ids``, tensors, lists of ids), the rows' own, which are then
    taken to be drawn at random. Of large ones 50,000 evenly spaced rows or the first 5,000 batches are looked at, for
    ``seconds`` at most. Random states stay as they are. Raises UsageError where rows have no length.
    """
    if isinstance(source, (str, Lengths)):
        return source if isinstance(source, Lengths) else parse_lengths(source)
    if getattr(source, "ndim", None) == 1:  # a tensor or an array of lengths
        source = source.tolist()
    of: Literal["rows", "batches"] = "rows"
    listed = isinstance(source, (list, tuple, range))
    if isinstance(source, Mapping) or (listed and all(isinstance(n, (Number, str)) for n in source)):
        found = source
    elif "length" in (getattr(source, "column_names", None) or ()):
        found = source["length"]  # type: ignore[call-overload]
    else:
        loader = isinstance(source, torch.utils.data.DataLoader)
        with all_random_states_kept():
            rows = in_time(source, BATCHES, seconds) if loader else in_time(_rows(source), ROWS, seconds)
            looked_at = list(map(_length_and_kind, rows))
        found = [max(1, length) for length, _ in looked_at]
        of = "batches" if loader or {kind for _, kind in looked_at} == {"batches"} else "rows"
    try:
        return Lengths(counts=dict(found if isinstance(found, Mapping) else Counter(found)), of=of)
    except (ValidationError, TypeError, ValueError):
        raise UsageError(
            f"lengths={str(source)[:60]}: lengths must be whole numbers above 0, and there must be at least one",
            remedy="Give a data set, a DataLoader, counts by length, or a length per row.",
        ) from None


def parse_lengths(text: str) -> Lengths:
    """From ``512:100,1024:40,4096:3``, or a file with a length, or a length and how many there are, on each line.

    Raises UsageError for anything else, naming the line.
    """
    if re.fullmatch(r"[0-9]+:[0-9]+(?:[,;\s]+[0-9]+:[0-9]+)*[,;\s]*", text):
        return _counted("--lengths", re.split(r"[,;\s]+", text.strip(" ,;")))
    try:
        lines = read_regular(Path(text), _BYTES).decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise UsageError(f"{text} is no text", remedy=_HOW) from None
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise UsageError(f"the lengths in {text} cannot be read: {why}", remedy=_HOW) from None
    return _counted(text, lines)


_HOW = "Give a file with a length, or a length and a count, on each line; or 512:100,1024:40,4096:3."


def _counted(name: str, lines: Iterable[str]) -> Lengths:
    counts = Counter[int]()
    for number, line in enumerate(lines, 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = re.fullmatch(_LINE, entry)
        length, count = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if not 0 < length <= MOST or count < 1:
            raise UsageError(f"{name}:{number}: {entry[:40]!r} is no length with a count", remedy=_HOW)
        counts[length] += count
    if not counts:
        raise UsageError(f"{name} holds no lengths", remedy=_HOW)
    return Lengths(counts=dict(counts))


def in_time(values: Iterable[Any], most: int, seconds: float) -> Iterator[Any]:
    """The first values, at most so many, as long as time allows; one at least."""
    until = time.monotonic() + seconds
    for number, value in enumerate(values):
        yield value
        if number + 1 >= most or time.monotonic() > until:
            return


def _rows(source: Any) -> Iterable[Any]:
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return (source[i] for i in range(0, len(source), max(1, -(-len(source) // ROWS))))
    if isinstance(source, Iterable):
        return source
    raise UsageError(
        f"a {type(source).__name__} has no rows to take lengths of", remedy="Give a data set, a DataLoader or a list."
    )


def _length_and_kind(row: Any) -> tuple[int, str]:
    """Tokens of a row, or of a padded batch."""
    value = row
    if isinstance(row, Mapping):
        value = next((row[name] for name in ("input_ids", "length", "inputs_embeds", "labels") if name in row), None)
    elif isinstance(row, tuple) and row:
        value = row[0]
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape) > 0:
        return int(shape[min(1, len(shape) - 1)]), "rows" if len(shape) == 1 else "batches"
    if isinstance(value, int) and not isinstance(value, bool):
        return value, "rows"
    if isinstance(value, (list, str)):
        inner = value[0] if value and isinstance(value, list) else None
        return (len(value), "rows") if not isinstance(inner, list) else (max(map(len, value)), "batches")
    raise UsageError(
        f"a row that is a {type(row).__name__} has no length that is known here",
        remedy="Give rows with `input_ids` (or `length`), lists of ids, or a length per row.",
    )


def shortened(step: Step, length: int) -> Step:
    """The step with its batch cut to ``length`` tokens a row. Raises UsageError for longer ones than it has, and for
    a batch or a step that cannot be cut."""
    have = step.settings.get("seq_len")
    if isinstance(have, int) and length > have:
        raise UsageError(
            f"the batch of the step has {have} tokens a row, the longest of the lengths {length}",
            remedy=f"Give a batch as long as the longest sequence, or lengths of at most {have}.",
        )
    return with_length(step, length)


def with_length(step: Step, length: int) -> Step:
    """The step with ``length`` tokens in each row of its batch: cut, or repeated. Raises UsageError for a batch or a
    step whose length is not known."""
    have = step.settings.get("seq_len")
    if step.full_step is not None or not isinstance(have, int):
        raise UsageError(
            "a batch without token ids, or a full_step of its own, cannot get another length",
            remedy="Give autockpt.Step(model, batch) whose batch holds input_ids.",
        )

    def sized(tensor: Tensor) -> Tensor:
        for dim in range(1, tensor.dim()):
            if tensor.shape[dim] == have and (dim == 1 or tensor.dim() > 3):
                tensor = torch.cat([tensor] * -(-length // have), dim).narrow(dim, 0, length)
        return tensor.contiguous() if tensor.dim() > 1 else tensor

    return step.with_batch(cut_tensors(step.batch, sized))
