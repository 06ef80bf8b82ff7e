"""What each of N ranks holds of a step under FSDP2 (``fully_shard`` on every block and on the root), ZeRO stage 3.

Rules of ``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`` with its defaults: blocks are freed after forward,
the root is not; gathering a block takes a flat buffer beside its weights; in backward the next block is gathered while
one runs, and the flat gradients of one block are being reduced while the next one runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from autockpt.schema import Graph, Storage
from autockpt.tracing.kernels.timeline import micro_batch_of, phases_of

_Row = tuple[int, int, int, str | None]  # birth, death, bytes, unit


def sharded(graph: Graph, ranks: int) -> Graph:
    """One rank's share of a graph: weights, gradients and optimizer states divided, gathered blocks added."""
    windows = _Windows(graph)
    storages: list[Storage] = []
    change = {"weights": 0, "optimizer states": 0}
    full: dict[str | None, int] = {}
    start = windows.first_step
    fresh = max((s.id for s in graph.storages), default=-1) + 1
    for s in graph.storages:
        if s.birth < 0 and s.kind in ("weight", "optimizer"):
            nbytes = -(-s.bytes // ranks)
            change["weights" if s.kind == "weight" else "optimizer states"] += nbytes - s.bytes
            if s.kind == "weight":
                full[s.unit] = full.get(s.unit, 0) + s.bytes
            storages.append(s.model_copy(update={"bytes": nbytes}))
        elif s.birth >= start and s.kind == "optimizer":
            storages.append(s.model_copy(update={"bytes": -(-s.bytes // ranks)}))
        elif s.birth >= 0 and s.kind == "gradient":
            storages += _gradient(s, windows.backward_end(s), ranks, fresh)
            fresh += 1
        else:
            storages.append(s)
    for birth, death, nbytes, unit in (*windows.gathered(full), *windows.reduced(_gradients(graph))):
        if nbytes and birth <= death:
            storages.append(Storage(id=fresh, bytes=nbytes, birth=birth, death=death, kind="other", unit=unit))
            fresh += 1
    resident = {k: v + change.get(k, 0) for k, v in graph.resident.items()}
    return changed(
        graph,
        storages=tuple(storages),
        resident=resident,
        resident_bytes=graph.resident_bytes + sum(change.values()),
    )


def changed(graph: Graph, **fields: Any) -> Graph:
    """The graph with other fields. (``model_copy`` would take the cached peak along.)"""
    return Graph.model_construct(**{name: getattr(graph, name) for name in Graph.model_fields} | fields)


def _gradient(s: Storage, end: int, ranks: int, fresh: int) -> list[Storage]:
    """A gradient is whole until its block's backward ends, then a share of it stays where the whole one would."""
    whole = s.model_copy(update={"death": end})
    if s.death is not None and s.death <= end:
        return [whole]
    share = s.model_copy(update={"id": fresh, "bytes": -(-s.bytes // ranks), "birth": end + 1})
    return [whole, share]


def _gradients(graph: Graph) -> dict[str | None, int]:
    """Bytes of what a micro-batch's gradients of each unit are together."""
    sums: dict[str | None, int] = {}
    for s in graph.held_gradients():
        sums[s.unit] = sums.get(s.unit, 0) + s.bytes
    return sums


class _Windows:
    """When each block runs: (first op, last op) of its forward and backward in every micro-batch."""

    def __init__(self, graph: Graph) -> None:
        batch = micro_batch_of(phases_of(graph))
        self.blocks = {u.name for u in graph.blocks()}
        self.first_step = next((op.index for op in graph.ops if op.phase == "optimizer"), len(graph.ops))
        self._forward: list[dict[str, list[int]]] = []
        self._backward: list[dict[str, list[int]]] = []
        self._whole: list[list[int]] = []
        for op in graph.ops[: self.first_step]:
            number = int(batch[op.index])
            while len(self._forward) <= number:
                self._forward.append({})
                self._backward.append({})
                self._whole.append([op.index, op.index])
            self._whole[number][1] = op.index
            if op.unit in self.blocks:
                place = self._forward if op.phase == "forward" else self._backward
                window = place[number].setdefault(op.unit, [op.index, op.index])  # type: ignore[arg-type]
                window[1] = op.index

    def backward_end(self, gradient: Storage) -> int:
        """The last op of the backward that makes this gradient."""
        for number, (first, last) in enumerate(self._whole):
            if first <= gradient.birth <= last:
                window = self._backward[number].get(gradient.unit or "")
                return last if window is None else max(window[1], gradient.birth)
        return gradient.birth

    def gathered(self, full: dict[str | None, int]) -> list[_Row]:
        """Whole weights and the flat buffers that they are gathered in."""
        rows: list[_Row] = []
        root = sum(n for unit, n in full.items() if unit not in self.blocks)
        for number, (first, last) in enumerate(self._whole):
            rows.append((first, last, root, None))
            for windows, ahead in ((self._forward[number], False), (self._backward[number], True)):
                ordered = sorted(windows.items(), key=lambda item: item[1][0])
                rows += [(begin, end, full.get(unit, 0), unit) for unit, (begin, end) in ordered]
                rows += _buffers([(unit, begin) for unit, (begin, _) in ordered], full, ahead)
        return rows

    def reduced(self, gradients: dict[str | None, int]) -> list[_Row]:
        """The flat gradients that are being reduced and scattered."""
        rows: list[_Row] = []
        for number, (_, last) in enumerate(self._whole):
            ends = sorted((w[1], u) for u, w in self._backward[number].items())
            for i, (end, unit) in enumerate(ends):
                until = ends[i + 1][0] - 1 if i + 1 < len(ends) else last
                rows.append((end, max(end, until), gradients.get(unit, 0), unit))
            rest = sum(n for unit, n in gradients.items() if unit not in self.blocks)
            rows.append((last, last, rest, None))
        return rows


def _buffers(starts: Sequence[tuple[str, int]], full: dict[str | None, int], ahead: bool) -> Iterator[_Row]:
    """Flat buffers: in forward until the next block begins; in backward (``ahead``) while the one before runs."""
    for i, (unit, start) in enumerate(starts):
        if ahead:
            birth, death = (starts[i - 1][1], start - 1) if i else (start, start)
        else:
            birth, death = start, starts[i + 1][1] - 1 if i + 1 < len(starts) else start
        yield birth, death, full.get(unit, 0), unit
