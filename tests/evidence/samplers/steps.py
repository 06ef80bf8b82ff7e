"""A made-up step as the Graph that autockpt's simulator judges, for any plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from autockpt.schema import SAVE, Choice, Graph, Unit
from autockpt.schema.graph import Copy, Op, Storage, TensorMeta
from tests.evidence.samplers.family import HIDDEN, INCOMING, OUTGOING, OUTPUT, Instance, Kind, Line, script

HEAD = ("head", "head_backward", "optimizer")
VIEW = "aten.t.default"


def signatures(instance: Instance) -> dict[str, float]:
    """True seconds of every op signature of a made-up model."""
    found: dict[str, float] = {}
    for kind in dict.fromkeys(instance.kinds):
        for j, op in enumerate(kind.ops):
            found[f"{kind.name} {j} forward"] = op.seconds
            found[f"{kind.name} {j} backward"] = op.back_seconds
    head = instance.head_seconds
    return found | dict(zip(HEAD, (head, 2 * head, instance.optimizer_seconds), strict=True)) | {VIEW: 0.0}


def resident_bytes(instance: Instance) -> int:
    """Weights, and the optimizer's two moments of them."""
    return 3 * sum(kind.weights for kind in instance.kinds)


def _made(model: type[Any], data: dict[str, Any]) -> Any:
    """A pydantic model from all of its fields, unchecked: a step is played thousands of times."""
    made = model.__new__(model)
    for name, value in (("__dict__", data), ("__pydantic_fields_set__", set(data))):
        object.__setattr__(made, name, value)
    for name in ("__pydantic_extra__", "__pydantic_private__"):
        object.__setattr__(made, name, None)
    return made


@dataclass
class _Group:
    """What an offloaded unit moves."""

    unit: str
    bytes: int
    storages: list[int]
    fetched: int | None = None  # index of the copy back
    out: int = 0


@dataclass
class _Recorder:
    """``detailed``: ops say what they read and make, which only the choice of selective sets asks for."""

    index: dict[str, int]
    detailed: bool
    ops: list[Op] = field(default_factory=list)
    born: list[tuple[int, int, str | None, str]] = field(default_factory=list)
    died: dict[int, int] = field(default_factory=dict)
    copies: list[dict[str, Any]] = field(default_factory=list)

    def new(self, size: int, unit: str | None, kind: str = "activation") -> int:
        self.born.append((size, len(self.ops), unit, kind))
        return len(self.born) - 1

    def free(self, storage: int) -> None:
        self.died[storage] = len(self.ops) - 1

    def op(self, signature: str, phase: str, unit: str | None = None, module: str = "", target: str = "") -> dict:
        """Note an op; its fields, to be added to."""
        data = {"index": len(self.ops), "target": target or signature, "phase": phase, "module": module, "unit": unit}
        data |= {
            "signature": self.index[signature],
            "flops": 0,
            "inputs": (),
            "offsets": (),
            "outputs": (),
            "saves": (),
        }
        self.ops.append(_made(Op, data))
        return data

    def copy(self, direction: str, group: _Group, awaited: bool) -> int:
        now = len(self.ops)
        self.copies.append(
            dict(direction=direction, bytes=group.bytes, issued=now, awaited=now if awaited else None, unit=group.unit)
        )
        return len(self.copies) - 1


class _Unit:
    """Plays one unit's script."""

    def __init__(self, r: _Recorder, name: str, kind: Kind, choice: Choice, entering: int) -> None:
        self.r, self.name, self.kind, self.script = r, name, kind, script(kind, choice)
        self.storages: dict[object, int] = {HIDDEN: entering}
        self.group: _Group | None = None

    def forward(self) -> int:
        """Its output."""
        for line in self.script.forward:
            self._play(line)
        if self.script.moved:
            held = [self.storages[k] for k in self.script.held]
            self.group = _Group(self.name, sum(self.r.born[s][0] for s in held), held)
        return self.storages.pop(OUTPUT)

    def backward(self, incoming: int) -> int:
        """The gradient that it hands on."""
        self.storages[INCOMING] = incoming
        for line in self.script.backward:
            self._play(line)
        return self.storages.pop(OUTGOING)

    def fetch(self) -> None:
        """Start the copy back, if there is one to start."""
        if self.group is not None and self.group.fetched is None:
            self.group.fetched = self.r.copy("in", self.group, awaited=False)
            for k in self.script.held:
                self.storages[k] = self.r.new(self.kind.size(k), self.name)

    def _play(self, line: Line) -> None:
        op, r, name = self.kind.ops[line.op], self.r, self.name
        module = f"{name}.{op.module}" if op.module else name
        if line.phase == "view":
            r.op(VIEW, "recompute", name, module)
            return
        for key, size, what in line.born:
            self.storages[key] = r.new(size, name, what)
        way = "backward" if line.phase == "backward" else "forward"
        noted = r.op(f"{self.kind.name} {line.op} {way}", line.phase, name, module, op.target)
        if r.detailed and way == "forward":
            made = self.storages[line.born[0][0]]
            noted["outputs"] = (TensorMeta(shape=(op.size,), stride=(1,), dtype="uint8", storage=made),)
            noted["inputs"] = tuple(self.storages[k] for k in op.reads if k in self.storages)
            noted["flops"] = int(op.seconds * 1e12) if op.weight else 0
        for key in line.died:
            r.free(self.storages.pop(key))


def step(instance: Instance, choices: Mapping[str, Choice] | None = None, *, instant: bool = False) -> Graph:
    """One step under a plan; units left out save everything.

    With queues what is moved leaves the device once the next unit's forward has ended, and comes back one unit ahead.
    ``instant``: it leaves and returns at once instead, which takes fewer bytes than any real schedule.
    """
    times = signatures(instance)
    changed = sum(choice != SAVE for choice in (choices or {}).values())
    r = _Recorder({text: i for i, text in enumerate(times)}, detailed=changed == 1)
    late = instance.queues and not instant
    hidden, pending = r.new(instance.kinds[0].hidden, None), None
    units: list[_Unit] = []
    for name, kind in zip(instance.units, instance.kinds, strict=True):
        unit = _Unit(r, name, kind, (choices or {}).get(name, SAVE), hidden)
        units.append(unit)
        hidden = unit.forward()
        pending = _after_forward(r, pending, unit.group, late)
    logits = r.new(instance.head_bytes, None)
    r.op("head", "forward")
    _after_forward(r, pending, None, late)
    gradient = r.new(instance.kinds[-1].hidden, None)
    r.op("head_backward", "backward")
    r.free(logits)
    r.free(hidden)
    for i, unit in reversed(list(enumerate(units))):
        unit.fetch()
        if late and i:
            units[i - 1].fetch()
        if unit.group is not None and unit.group.fetched is not None:
            r.copies[unit.group.fetched]["awaited"] = len(r.ops)
        gradient = unit.backward(gradient)
        if unit.group is not None:
            r.copies[unit.group.out]["released"] = len(r.ops)
    r.free(gradient)
    r.op("optimizer", "optimizer")
    return _graph(instance, r, tuple(times))


def _after_forward(r: _Recorder, pending: _Group | None, group: _Group | None, late: bool) -> _Group | None:
    """Send a group off and let go of the one before it; what is still on its way."""
    if group is not None:
        group.out = r.copy("out", group, awaited=not late)
    gone = pending if late else group
    if gone is not None:
        r.copies[gone.out]["awaited"] = len(r.ops)
        for storage in gone.storages:
            r.free(storage)
    return group if late else None


@cache
def units_of(instance: Instance) -> tuple[Unit, ...]:
    """Blocks in order, then their attention and MLP."""
    numbers = {kind: i for i, kind in enumerate(dict.fromkeys(instance.kinds))}
    pairs = list(zip(instance.units, instance.kinds, strict=True))
    units = [Unit(name=name, cls="Block", kind=numbers[kind]) for name, kind in pairs]
    for name, kind in pairs:
        modules = {op.module.split(".")[0] for op in kind.ops}
        if "self_attn" in modules:
            units.append(Unit(name=f"{name}.self_attn", cls="Attention", kind=0, role="attention", parent=name))
        units.append(Unit(name=f"{name}.mlp", cls="MLP", kind=0, role="mlp", parent=name))
    return tuple(units)


def _graph(instance: Instance, r: _Recorder, texts: tuple[str, ...]) -> Graph:
    storages = []
    for i, (size, birth, unit, kind) in enumerate(r.born):
        death = r.died.get(i, len(r.ops) - 1)
        data = {"id": i, "bytes": size, "birth": birth, "death": death, "kind": kind, "unit": unit}
        storages.append(_made(Storage, data))
    copies = tuple(_made(Copy, {"tier": "cpu", "released": None} | c) for c in r.copies)
    return Graph.model_construct(
        source="ghost",
        resident_bytes=resident_bytes(instance),
        resident={},
        signatures=texts,
        ops=tuple(r.ops),
        storages=tuple(storages),
        copies=copies,
        units=units_of(instance),
        notes=(),
    )
