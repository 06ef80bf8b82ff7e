"""A memory snapshot of PyTorch's CUDA allocator: what was alive when memory ran out, and who had asked for it.

The structure is that of ``torch.cuda.memory._snapshot`` (torch/cuda/memory.py, torch/csrc/cuda/Module.cpp): segments of
blocks as they are when the snapshot is taken, and per device the last events. Between an OOM and the dump Python has
often unwound and freed; the events after the last OOM are taken back, so that what is told is the moment of the
failure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from autockpt.diagnose.frames import place_of, purpose_of, telling_frame
from autockpt.diagnose.unpickle import load_data
from autockpt.errors import UsageError
from autockpt.schema.diagnosis import BlockGroup, Frame, SnapshotReading

GROUPS = 12
MOST_BLOCKS, MOST_EVENTS, MOST_FRAMES = 5_000_000, 20_000_000, 400
_IN_USE = ("active_allocated", "active_awaiting_free", "active_pending_free")
_LARGEST = 2**50
_REMEDY = "Write it with torch.cuda.memory._dump_snapshot(FILE) after _record_memory_history()."


@dataclass
class _Block:
    """A block in use, by address."""

    size: int
    requested: int
    frames: Any = None
    awaiting: bool = False
    traced: bool = False  # its allocation is among the events


@dataclass
class _State:
    """What a device's allocator holds at a moment."""

    device: int
    reserved: int = 0
    segments: int = 0
    blocks: dict[int, _Block] = field(default_factory=dict)
    free_blocks: list[int] = field(default_factory=list)


def read_snapshot(path: Path) -> SnapshotReading:
    """What a snapshot file tells of one device: the one that ran out of memory last, else the fullest.

    No code of the file is run. Raises UsageError for a file that is no snapshot, is cut off, or holds more than data.
    """
    return summarise_snapshot(load_data(path), str(path))


def summarise_snapshot(data: Any, name: str = "the snapshot") -> SnapshotReading:
    """The same for a loaded snapshot. Raises UsageError where its structure is another."""
    try:
        return _Snapshot(data, name).reading()
    except _Malformed as error:
        raise UsageError(f"{name} is no memory snapshot: {error}", remedy=_REMEDY) from None


class _Malformed(Exception):
    """What is wrong with the structure, in words."""


class _Snapshot:
    def __init__(self, data: Any, name: str) -> None:
        # before 2.0 a snapshot was the bare list of segments
        root = data if isinstance(data, dict) else {"segments": data, "device_traces": []}
        self.name = name
        self.segments = _list(root.get("segments"), "segments")
        self.traces = [_list(t, "a device's trace") for t in _list(root.get("device_traces", []), "device_traces")]
        if len(self.segments) > MOST_BLOCKS or sum(map(len, self.traces)) > MOST_EVENTS:
            raise _Malformed("it has more segments or events than a device makes")
        self._frames: dict[int, tuple[Frame, ...]] = {}
        self.notes: list[str] = []

    def reading(self) -> SnapshotReading:
        states = self._states()
        ooms = {d: at for d, trace in enumerate(self.traces) if (at := _last_oom(trace)) is not None}
        # the fullest of those that ran out, else of all
        among = [d for d in ooms if d in states] or list(states) or [0]
        device = max(among, key=lambda d: states[d].reserved if d in states else 0)
        if device not in states and device not in ooms:
            raise UsageError(f"{self.name} has nothing of GPU {device}", remedy=_REMEDY)
        state = states.get(device, _State(device))
        trace = self.traces[device] if device < len(self.traces) else ()
        event = _dict(trace[ooms[device]], "an event") if device in ooms else None
        if event is not None:
            self._rewind(state, trace, ooms[device])
        # the stack of an event that frees may be that of the free: the allocation's own is better
        for raw in trace[: ooms.get(device)]:
            if isinstance(raw, dict) and raw.get("action") == "alloc":
                block = state.blocks.get(raw.get("addr", raw.get("address", -1)))
                if block is not None and raw.get("size") in (block.requested, block.size):
                    block.frames, block.traced = raw.get("frames"), True
        return self._summary(state, event)

    def _states(self) -> dict[int, _State]:
        """Per device the state in which the snapshot was taken."""
        states: dict[int, _State] = {}
        total = 0
        for entry in self.segments:
            segment = _dict(entry, "a segment")
            number = _int(segment.get("device", 0), "a segment's device")
            state = states.setdefault(number, _State(number))
            state.segments += 1
            state.reserved += _int(segment.get("total_size"), "a segment's total_size")
            address = _int(segment.get("address", 0), "a segment's address")
            blocks = _list(segment.get("blocks"), "a segment's blocks")
            total += len(blocks)
            if total > MOST_BLOCKS:
                raise _Malformed(f"it has more than {MOST_BLOCKS:,} blocks")
            for raw in blocks:
                block = _dict(raw, "a block")
                size = _int(block.get("size"), "a block's size")
                # old snapshots have no address: blocks follow one another
                at = _int(block.get("address", address), "a block's address")
                address = at + size
                self._put(state, at, size, block)
        return states

    def _put(self, state: _State, at: int, size: int, block: Mapping[str, Any]) -> None:
        kind = block.get("state")
        if kind not in _IN_USE:
            state.free_blocks.append(size)
            return
        frames, requested = block.get("frames"), block.get("requested_size")
        if frames is None and (history := block.get("history")):
            first = _dict(_list(history, "a block's history")[0], "a block's history")
            frames, requested = first.get("frames"), requested or first.get("real_size")
        asked = _int(requested, "a block's requested_size") if requested is not None else size
        state.blocks[at] = _Block(size, asked, frames, awaiting=kind != "active_allocated")

    def _rewind(self, state: _State, trace: Sequence[Any], oom: int) -> None:
        """Take back what happened after the OOM: events are of the end, so their last part is always there."""
        freed = 0
        for raw in reversed(trace[oom + 1 :]):
            event = _dict(raw, "an event")
            action, size = event.get("action"), _int(event.get("size", 0), "an event's size")
            at = event.get("addr", event.get("address"))
            if action == "alloc" and isinstance(at, int):
                state.blocks.pop(at, None)
            elif action in ("free_completed", "free") and isinstance(at, int):
                state.blocks[at] = _Block(size, size, event.get("frames"))
                freed += size
            elif action in ("segment_alloc", "segment_map"):
                state.reserved -= size
                state.segments -= action == "segment_alloc"
            elif action in ("segment_free", "segment_unmap"):
                state.reserved += size
                state.segments += action == "segment_free"
        if freed:
            # which free blocks there were between them is not told by the events
            state.free_blocks = []
            self.notes.append("the snapshot was taken after the failure; what had been freed since is counted again")

    def _summary(self, state: _State, event: Mapping[str, Any] | None) -> SnapshotReading:
        allocated = sum(b.size for b in state.blocks.values())
        groups, purposes = self._grouped(state.blocks.values())
        with_stacks = any(g.frame is not None for g in groups)
        if not with_stacks:
            self.notes.append(
                "no stacks were recorded, so who asked for the blocks is not known; record them with "
                "torch.cuda.memory._record_memory_history(stacks='python') before training"
            )
        if event is None:
            self.notes.append("it has no OOM event: this is what was alive when it was taken")
        at_oom, event = event is not None, event or {}
        free, reserved = event.get("device_free"), max(state.reserved, allocated)
        return SnapshotReading(
            path=self.name,
            device=state.device,
            reserved=reserved,
            allocated=allocated,
            requested=sum(b.requested for b in state.blocks.values()),
            awaiting=sum(b.size for b in state.blocks.values() if b.awaiting),
            inactive=reserved - allocated,
            largest_free=max(state.free_blocks, default=0),
            segments=max(0, state.segments),
            at_oom=at_oom,
            tried=_int(event.get("size", 0), "the OOM's size") if at_oom else None,
            free=free if isinstance(free, int) and 0 <= free < _LARGEST else None,
            place=place_of(self._stack(event.get("frames"))),
            purposes=dict(sorted(purposes.items(), key=lambda item: -item[1])) if with_stacks else {},
            groups=tuple(groups[:GROUPS]),
            other_bytes=sum(g.bytes for g in groups[GROUPS:]),
            other_count=sum(g.count for g in groups[GROUPS:]),
            with_stacks=with_stacks,
            notes=tuple(self.notes),
        )

    def _grouped(self, blocks: Iterable[_Block]) -> tuple[list[BlockGroup], dict[str, int]]:
        sizes: dict[tuple[str, Frame | None], list[int]] = defaultdict(list)
        purposes: dict[str, int] = defaultdict(int)
        known: dict[tuple[int, bool], tuple[str, Frame | None]] = {}
        for block in blocks:
            same = (id(block.frames) if block.frames else 0, block.traced)
            if same not in known:
                frames = self._stack(block.frames)
                known[same] = (purpose_of(frames, recorded=block.traced), telling_frame(frames))
            sizes[known[same]].append(block.size)
            purposes[known[same][0]] += block.size
        groups = [BlockGroup(purpose=p, frame=f, bytes=sum(all_), count=len(all_)) for (p, f), all_ in sizes.items()]
        return sorted(groups, key=lambda g: -g.bytes), purposes

    def _stack(self, raw: Any) -> tuple[Frame, ...]:
        """Frames outermost first; a snapshot has them innermost first, and shares one list among many blocks."""
        if not raw:
            return ()
        key = id(raw)
        if key not in self._frames:
            self._frames[key] = tuple(_frames(_list(raw, "frames")))[::-1]
        return self._frames[key]


def _frames(raw: Sequence[Any]) -> Iterator[Frame]:
    for entry in raw[:MOST_FRAMES]:
        f = _dict(entry, "a frame")
        line = f.get("line", 0)
        yield Frame(
            file=str(f.get("filename", ""))[:500],
            line=line if isinstance(line, int) and 0 <= line < 2**31 else 0,
            function=str(f.get("name", ""))[:200],
        )


def _last_oom(trace: Sequence[Any]) -> int | None:
    backwards = (i for i in reversed(range(len(trace))) if isinstance(trace[i], dict))
    return next((i for i in backwards if trace[i].get("action") == "oom"), None)


def _dict(value: Any, what: str) -> dict[str, Any]:
    return value if isinstance(value, dict) else _refuse(value, what, "dict")


def _list(value: Any, what: str) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else _refuse(value, what, "list")


def _int(value: Any, what: str) -> int:
    sound = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64
    return value if sound else _refuse(value, what, "size")


def _refuse(value: Any, what: str, wanted: str) -> NoReturn:
    found = str(value)[:40] if isinstance(value, int | float) else f"a {type(value).__name__}"
    raise _Malformed(f"{what} is {'missing' if value is None else found}, not a {wanted}")
