"""A made-up training step as a Graph, for any plan: small enough to check by hand, shaped like the real ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autockpt.schema.choices import SAVE, Choice
from autockpt.schema.graph import Copy, Graph, Op, Phase, Storage, Unit

HIDDEN, INSIDE, TRANSIENT, GRADIENT, RESIDENT, HEAD = 10, 30, 7, 25, 1000, 18
SECONDS = {"f": 1.0, "b": 2.0, "head": 0.5, "opt": 3.0}


@dataclass
class _Recorder:
    ops: list[Op] = field(default_factory=list)
    born: dict[int, tuple[int, int, str | None, str]] = field(default_factory=dict)
    died: dict[int, int] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)

    @property
    def now(self) -> int:
        return len(self.ops)

    def op(self, signature: str, phase: Phase, unit: str | None) -> None:
        self.ops.append(
            Op(
                index=self.now,
                target=signature,
                phase=phase,
                module=unit or "",
                unit=unit,
                signature=list(SECONDS).index(signature),
            )
        )

    def new(self, size: int, unit: str | None, kind: str = "activation") -> int:
        """A storage alive from the next op on."""
        self.born[len(self.born)] = (size, self.now, unit, kind)
        return len(self.born) - 1

    def free(self, storage: int) -> None:
        """The storage is gone before the next op."""
        self.died[storage] = self.now - 1


def step(
    names: list[str], choices: Mapping[str, Choice] | None = None, *, micro_batches: int = 1, lag: bool = False
) -> Graph:
    """One cycle: per unit three forward ops and two backward ops, a head, gradients, an optimizer.

    A saving unit keeps ``INSIDE`` bytes beside its output; a recomputed one makes them again in backward; an offloaded
    one sends them off right away and takes them back before its backward, or with ``lag`` one unit late and one early.
    """
    r = _Recorder()
    choices = {name: (choices or {}).get(name, SAVE) for name in names}
    gradients: list[int] = []
    for m in range(micro_batches):
        hidden = [r.new(HIDDEN, None)]
        r.op("f", "forward", None)
        inside: dict[str, int] = {}
        leaving: list[int] = []
        for name in names:
            inside[name], transient = r.new(INSIDE, name), r.new(TRANSIENT, name)
            r.op("f", "forward", name)
            r.op("f", "forward", name)
            r.free(transient)
            hidden.append(r.new(HIDDEN, name))
            r.op("f", "forward", name)
            for storage in leaving:
                r.free(storage)
            leaving = []
            if choices[name].kind == "recompute":
                r.free(inside[name])
            elif choices[name].kind == "offload":
                r.copies.append(Copy(direction="out", bytes=INSIDE, issued=r.now, awaited=None, unit=name))
                if lag:
                    leaving.append(inside[name])
                else:
                    r.free(inside[name])
        logits = r.new(HEAD, None)
        r.op("head", "forward", None)
        for storage in leaving:
            r.free(storage)
        gradient = r.new(HIDDEN, None)
        r.op("head", "backward", None)
        r.free(logits)
        back: dict[str, int] = {}
        for i, name in reversed(list(enumerate(names))):
            for early in [name, names[i - 1]] if lag and i else [name]:
                if choices[early].kind == "offload" and early not in back:
                    r.copies.append(Copy(direction="in", bytes=INSIDE, issued=r.now, awaited=r.now, unit=early))
                    back[early] = r.new(INSIDE, early)
            if choices[name].kind == "recompute":
                back[name] = r.new(INSIDE, name)
                r.op("f", "recompute", name)
                r.op("f", "recompute", name)
            weight_gradient = r.new(GRADIENT, name, "gradient") if m == 0 else r.new(GRADIENT, name)
            r.op("b", "backward", name)
            if m == 0:
                gradients.append(weight_gradient)
            else:
                r.free(weight_gradient)
            following = r.new(HIDDEN, name)
            r.op("b", "backward", name)
            r.free(gradient)
            r.free(back.get(name, inside[name]))
            r.free(hidden[i + 1])
            gradient = following
        r.op("b", "backward", None)
        r.free(gradient)
        r.free(hidden[0])
    r.op("opt", "optimizer", None)
    for storage in gradients:
        r.free(storage)
    storages = tuple(
        Storage(id=i, bytes=size, birth=birth, death=r.died.get(i), kind=kind, unit=unit)  # type: ignore[arg-type]
        for i, (size, birth, unit, kind) in r.born.items()
    )
    units = tuple(Unit(name=name, cls="Block", kind=0) for name in names)
    return Graph(
        resident_bytes=RESIDENT,
        signatures=tuple(SECONDS),
        work=(),
        ops=tuple(r.ops),
        storages=storages,
        copies=tuple(r.copies),
        units=units,
    )
