"""A rule of thumb, whose it is, and what becomes of it on one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from autockpt.schema import format_binary, words

Range = tuple[float, float]


class Quantity(NamedTuple):
    """How a figure reads, and what is wrong where it lies below or above what was promised; empty: nothing."""

    shown: Callable[[float], str]
    below: str = ""
    above: str = ""
    is_amount: bool = False


def _less(share: float) -> str:
    return f"{words.share(share)} less"


QUANTITIES = {
    "forwards": Quantity("{:.2f} forwards".format, "less work", "more work"),  # FLOPs of a step
    "bytes": Quantity(lambda size: format_binary(round(size)), "less", "more", True),
    "times": Quantity("{:.3g} ×".format, "less", "more", True),
    "layers": Quantity("{:.3g} layers".format, "less", "more", True),
    "peak": Quantity(_less, below="saves less"),  # of the save-everything peak
    "activations": Quantity(_less, below="saves less"),  # of the activations and transients at that peak
    "time": Quantity(lambda share: f"{words.share(share, signed=True)} time", above="takes longer"),
}


class Source(NamedTuple):
    """Who says it, and where; without an address no page could be named."""

    name: str
    address: str = ""

    def __str__(self) -> str:
        return f"[{self.name}]({self.address})" if self.address else self.name


@dataclass(frozen=True)
class Rule:
    """A rule of thumb: what is ``promised`` for this model, from and to, and what was ``found``, by quantity."""

    name: str
    source: Source
    says: str
    promised: Mapping[str, Range]
    found: Mapping[str, float]
    note: str = ""

    def misses(self) -> tuple[str, ...] | None:
        """What of the rule does not hold, in words; None where nothing that it promises is known."""
        wrong = []
        for what in (what for what in self.promised if what in self.found):
            (low, high), value, quantity = self.promised[what], self.found[what], QUANTITIES[what]
            wrong.append(quantity.below if value < low else quantity.above if value > high else "")
        return tuple(filter(None, wrong)) if wrong else None

    def cells(self) -> tuple[str, str, str, str]:
        """A row of the table."""
        says = [self.says]
        for what, (low, high) in self.promised.items():
            if (quantity := QUANTITIES[what]).is_amount:
                start = "at most " if not low else f"{quantity.shown(low)} to " if low != high else ""
                says.append(f"here {start}{quantity.shown(high)}")
        figures = [quantity.shown(self.found[what]) for what, quantity in QUANTITIES.items() if what in self.found]
        misses = self.misses()
        verdict = [] if misses is None else [f"**no**: {', '.join(misses)}"] if misses else ["holds"]
        predicted = "; ".join([", ".join(figures), *verdict]) if figures else self.note
        if self.note and figures:
            says.append(self.note)
        return self.name, str(self.source), "; ".join(says), predicted


@dataclass(frozen=True)
class Rules:
    """Rules of thumb put to the test on one model."""

    heading: str
    job: str
    basis: str
    save_all_peak: int
    activation_bytes: int
    rules: tuple[Rule, ...]
    notes: tuple[str, ...] = ()

    def table(self) -> str:
        """The rules as a Markdown table, with what its numbers rest on."""
        peak, activations = format_binary(self.save_all_peak), format_binary(self.activation_bytes)
        lines = [
            f"## {self.heading}\n",
            f"{self.job}. Saving everything peaks at {peak}; {activations} of it are activations and "
            f"transients. About seconds: {self.basis}.\n",
            "| rule | source | says | predicted |\n|---|---|---|---|",
            *(f"| {' | '.join(rule.cells())} |" for rule in self.rules),
        ]
        return "\n".join([*lines, *("", *(f"- {note}" for note in self.notes)) * bool(self.notes)])
