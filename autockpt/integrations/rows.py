"""Find the rows of a trainer's data set that make its largest batches, without side effects on training."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any, Literal

import torch
from torch import nn

from autockpt.devices.random_states import all_random_states_kept
from autockpt.errors import UsageError
from autockpt.measuring.snapshot import putting_back
from autockpt.schema.lengths import Lengths
from autockpt.workload import Step, nested_tensors
from autockpt.workload.lengths import in_time, lengths_of

OWN = "auto"  # lengths: those of the trainer's data set
ROWS = 4096
_SECONDS_FOR_ROWS = 20.0
_HOLDERS = 1000
_OPAQUE = (nn.Module, torch.Tensor, type, ModuleType, FunctionType)


def largest_batch(first: Any, dataset: Any, collate: Any, rows: int | None) -> tuple[Any, str]:
    """The batch to plan for, and a word on where it is from: whatever trains within the budget must fit with it.

    That is the longest ``rows`` of the data set put together, where its rows can be had by number and make a larger
    batch than the ``first`` one, which training begins with. Of large data sets a sample is looked at. Random states,
    those of ``dataset`` and ``collate`` too, and the order of the data stay as they are.
    """
    if not _by_number(dataset):
        return first, "the first batch: rows of this data set cannot be had by number, so longer ones may come"
    if not rows or not callable(collate):
        return first, "the first batch"
    try:
        with _as_before(dataset, collate):
            longest, looked_at = _longest(dataset, collate, rows)
            made = collate([dataset[i] for i in longest])
    except Exception as error:
        return first, f"the first batch ({type(error).__name__} where the longest rows were put together)"
    if _numbers(made) <= _numbers(first):
        return first, "the first batch: the longest rows make no larger one"
    total = len(dataset)
    among = "" if looked_at == total else f" among {looked_at} of {total}"
    return made, f"the {len(longest)} longest rows{among}"


def lengths_here(
    asked: Lengths | Literal["auto"], step: Step, dataset: Any, collate: Any
) -> tuple[Lengths | None, str]:
    """The lengths to search for, none longer than the step's batch; None, and why, where all batches are as long."""
    have, rows = step.settings.get("seq_len"), step.settings.get("batch_size")
    if not isinstance(have, int) or not isinstance(rows, int):
        raise UsageError("these batches have no rows of tokens", remedy="Leave lengths= out.")
    if asked == OWN:
        if not _by_number(dataset):
            raise UsageError(
                "rows of this data set cannot be had by number, so their lengths are unknown",
                remedy="Give lengths= a DataLoader, counts by length, or a length per row.",
            )
        with _as_before(dataset, collate):
            asked = lengths_of(dataset, seconds=_SECONDS_FOR_ROWS)
            shortest = min(range(min(len(dataset), ROWS)), key=lambda number: _elements(dataset[number]))
            padded = lengths_of([collate([dataset[shortest]] * rows)]).longest
        if padded >= have:
            return None, f"every batch is padded to {have} tokens, so lengths do not matter"
    cut = asked.cut(have)
    counts = dict(cut.counts)
    counts[have] = counts.pop(cut.longest)  # of a collator that rounds lengths up
    return Lengths(counts=counts, of=cut.of), f"{asked}"


def _by_number(dataset: Any) -> bool:
    """Whether any row of a data set can be asked for."""
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return indexed and not isinstance(dataset, torch.utils.data.IterableDataset)


def _longest(dataset: Any, collate: Any, rows: int) -> tuple[list[int], int]:
    """Numbers of the rows that make the largest batches, and how many were looked at: all, or a sample of what time
    allows. A batch is as long as its longest row: what a row becomes in a batch of its own counts, padded as that is,
    and then what it holds."""
    total = len(dataset)
    sample = random.Random(0).sample(range(total), min(total, ROWS))  # of whatever order, as far as time allows
    sizes = {}
    for number in in_time(sample, ROWS, _SECONDS_FOR_ROWS):
        row = dataset[number]
        sizes[number] = _collated(collate, row), _elements(row)
    longest = sorted(sizes, key=lambda number: (*(-size for size in sizes[number]), number))[:rows]
    return (longest * rows)[:rows], len(sizes)


def _collated(collate: Any, row: Any) -> int:
    """The numbers in a batch of this row; 0 where ``collate`` makes none of a single one."""
    try:
        return _numbers(collate([row]))
    except Exception:
        return 0


def _elements(row: Any) -> int:
    """How much a row of a data set holds: numbers of its tensors and arrays, members of its lists."""
    if isinstance(row, Mapping):
        return sum(map(_elements, row.values()))
    if isinstance(row, (list, tuple)):
        return sum(_elements(v) if isinstance(v, (list, tuple, Mapping, torch.Tensor)) else 1 for v in row)
    return int(getattr(row, "size", 1)) if hasattr(row, "__array_interface__") else _numbers(row)


def _numbers(batch: Any) -> int:
    return sum(tensor.numel() for tensor in nested_tensors(batch))


@contextmanager
def _as_before(*objects: Any) -> Iterator[None]:
    """Random states are afterwards as before, and so are the attributes of these objects: collators and data sets may
    count, or draw from a generator of their own."""
    numpy: Any = sys.modules.get("numpy")
    draws = random.Random, torch.Generator, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ())
    holders = list(_holders(objects))
    generators = (value for values in holders for value in values.values() if isinstance(value, draws))
    with all_random_states_kept(), ExitStack() as undo:
        for thing in (*holders, *generators):
            undo.callback(putting_back(thing))
        yield


def _holders(objects: Any) -> Iterator[dict[str, Any]]:
    """The attributes of objects, and of such data sets and functions as they wrap."""
    seen, rest = set[int](), list(objects)
    while rest and len(seen) < _HOLDERS:
        value = rest.pop()
        if isinstance(value, functools.partial):
            rest += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            rest.append(value.__self__)
        elif id(value) not in seen and not isinstance(value, _OPAQUE) and hasattr(value, "__dict__"):
            seen.add(id(value))
            yield vars(value)
            rest += [v for v in vars(value).values() if callable(v) or hasattr(type(v), "__getitem__")]
