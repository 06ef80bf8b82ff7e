"""Find modules that are worth a choice where no blocks repeat, and modules outside of blocks that hold much memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from autockpt.schema.graph import Graph
from autockpt.schema.names import ancestors, fold, listing
from autockpt.schema.sizes import format_bytes

SMALL = 0.5  # inputs are small that are at most this part of what the module keeps
MOST_INSIDE = 24  # a module is not split into more
WORTH_SPLITTING = 0.5  # the members of a module are chosen for where together they free this part of what it would
LEAST = 0.01  # of all that is kept: what frees less is left out
MOST_NAMED = 4
MUCH = 0.1  # of the peak: modules without a choice that hold this much together are worth a note


def find_cuts(graph: Graph, called: Collection[str]) -> list[str]:
    """Names of the modules that keep the most for backward beyond their inputs, none inside another.

    ``graph`` saves everything; ``called`` are the modules with a forward of their own that ran. A module is split into
    its members where these free nearly as much: recomputing several small ones needs less than recomputing one large
    one. The root is never one of them, as recomputing the whole model frees nothing at the peak.
    """
    kept, given = bytes_of_modules(graph)
    members: dict[str, list[str]] = defaultdict(list)
    for path in kept:
        if path:
            members[path.rpartition(".")[0]].append(path)
    least = LEAST * kept.get("", 0)

    def freed(path: str) -> int:
        return kept[path] - given.get(path, 0)

    def cuts(path: str) -> list[str]:
        inside = [cut for member in members[path] for cut in cuts(member)]
        worth = path in called and freed(path) > least and given.get(path, 0) <= SMALL * kept[path]
        if not path or not worth:
            return inside
        enough = sum(map(freed, inside)) >= WORTH_SPLITTING * freed(path)
        return inside if enough and 2 <= len(inside) <= MOST_INSIDE else [path]

    return cuts("")


def cuts_note(graph: Graph, cuts: Sequence[str]) -> str:
    """A note on the cuts and the bytes that they hold."""
    kept, given = bytes_of_modules(graph)
    held, inputs = (sum(of.get(cut, 0) for cut in cuts) for of in (kept, given))
    part = f"{held / kept[''] * 100:.0f} % of" if kept.get("") else ""
    return (
        f"Chosen for are the modules that keep most beyond their inputs: {listing(cuts)} ({part} what is kept for "
        f"backward, {format_bytes(held)}, for {format_bytes(inputs)} of inputs). `units` of the job names others."
    )


def left_out_notes(graph: Graph, outside: Collection[str]) -> tuple[str, ...]:
    """A note on modules without a choice that hold much of the peak for backward, if there are any.

    ``graph`` saves everything; ``outside`` are the modules that were called outside of units and of the output head.
    """
    kept, _ = bytes_of_modules(graph)
    held = {cut: kept[cut] for cut in find_cuts(graph, outside)}
    total = sum(held.values())
    if not total or total < MUCH * graph.peak_bytes:
        return ()
    largest = sorted(held, key=lambda cut: -held[cut])
    listed = ", ".join(f"{cut} {format_bytes(held[cut])}" for cut in largest[:MOST_NAMED])
    more = f" and {len(largest) - MOST_NAMED} more" if len(largest) > MOST_NAMED else ""
    units = ",".join(fold(dict.fromkeys([*(unit.name for unit in graph.blocks()), *largest], "")))
    share = total / graph.peak_bytes
    return (
        f"Modules that are no units hold {share * 100:.0f} % of the peak of saving everything, and no choice is made "
        f"for them: {listed}{more}. `units: '{units}'` in the --job file makes them units (units= of a Step).",
    )


def no_head_notes(graph: Graph) -> tuple[str, ...]:
    """A note on log-probabilities of tokens that hold much of the peak, for models whose output head is not known."""
    born = ((s, graph.ops[s.birth]) for s in graph.storages if s.kind == "activation" and s.birth >= 0)
    # only tokens × vocabulary is looked at, whose loss can be taken in chunks
    held = [s.bytes for s, op in born if op.target.startswith("aten._log_softmax.") and len(op.outputs[0].shape) == 2]
    largest = max(held, default=0)
    if largest <= MUCH * graph.peak_bytes:
        return ()
    return (
        f"Log-probabilities hold {largest / graph.peak_bytes * 100:.0f} % of the peak of saving everything, and no "
        "choice is made for them, as no output head is known: an nn.Linear that `get_output_embeddings()` returns.",
    )


def bytes_of_modules(graph: Graph) -> tuple[dict[str, int], dict[str, int]]:
    """By module with its contents: bytes that its first forward leaves for backward, and bytes of its inputs.

    The empty name is the whole model. Inputs are activations that are made elsewhere, each counted once.
    """
    stop = next((op.index for op in graph.ops if op.phase != "forward"), len(graph.ops))
    ops = graph.ops[:stop]
    around = {op.module: (op.module, *ancestors(op.module), "") if op.module else ("",) for op in ops}
    kept: dict[str, int] = defaultdict(int)
    made: dict[int, str] = {}
    size: dict[int, int] = {}
    for storage in graph.storages:
        if storage.kind == "activation" and 0 <= storage.birth < stop:
            made[storage.id], size[storage.id] = ops[storage.birth].module, storage.bytes
            if storage.death is None or storage.death >= stop:
                for path in around[made[storage.id]]:
                    kept[path] += storage.bytes
    readers: dict[int, set[str]] = defaultdict(set)
    for op in ops:
        for storage in op.inputs:
            if storage in made:
                readers[storage].update(around[op.module])
    given: dict[str, int] = defaultdict(int)
    for storage, paths in readers.items():
        for path in paths.difference(around[made[storage]]):
            given[path] += size[storage]
    return dict(kept), dict(given)
