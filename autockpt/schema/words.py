"""Numbers and plans as text for people: times, shares, counts, and a plan in one line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import groupby

from autockpt.schema.choices import CHOICE_TYPES, SAVE, Choice
from autockpt.schema.device import Environment
from autockpt.schema.names import ancestors, outermost
from autockpt.schema.sizes import format_binary, three
from autockpt.schema.trial import Measurement, Prediction
from autockpt.schema.workload import WorkloadSpec

NO_DIFFERENCE = 0.0005  # of a step: what would be printed as 0.0 %
USELESS_NOISE = 0.9995  # what would be printed as 100 % or more
NOISE_UNKNOWN = "±?: too few steps timed to estimate noise"


def seconds(value: float) -> str:
    """``12.3 ms``, ``1.23 s``, ``4 min 05 s``: three significant digits."""
    if value < 0:
        return f"-{seconds(-value)}"
    if value >= 3599.5:
        return f"{int(value // 3600)} h {int(value % 3600 // 60):02d} min"
    if value >= 99.95:
        return f"{int(value + 0.5) // 60} min {int(value + 0.5) % 60:02d} s"
    if value >= 0.9995:
        return f"{three(value)} s"
    return f"{three(value * 1e3)} ms" if value >= 0.9995e-3 or value == 0 else f"{three(value * 1e6)} µs"


def when(value: float) -> str:
    """Seconds since 1970 as a time of day, in the machine's own zone: ``2026-11-22 17:05``."""
    return datetime.fromtimestamp(value).astimezone().strftime("%Y-%m-%d %H:%M")


def share(value: float, signed: bool = False) -> str:
    """A ratio as ``+12.3 %``."""
    text = f"{value * 100:{'+' if signed else ''}.1f}"
    return f"{text.replace('-0.0', '0.0').replace('+0.0', '0.0')} %"


def step_time(measured: Measurement) -> str:
    """``412 ms ±0.8 %``; ``±?`` where the noise is as large as the time itself, or where nothing is known about it."""
    if measured.noise >= USELESS_NOISE:
        noise = " ±?"
    else:
        noise = f" ±{measured.noise * 100:.1f} %" if measured.noise > 0 else ""
    return seconds(measured.step_seconds) + noise


def step_of(score: Measurement | Prediction | None) -> str:
    """The step time of real steps; ``~412 ms`` of what was predicted, ``—`` where neither says any."""
    if isinstance(score, Measurement):
        return step_time(score)
    return f"~{seconds(score.step_seconds)}" if score is not None and score.step_seconds else "—"


def by_rank(measured: Measurement | None) -> str:
    """Peak and step of each rank of a job where they differ by more than is printed, or than noise; else empty."""
    if measured is None:
        return ""
    peaks, steps = [format_binary(size) for size in measured.peak_by_rank], measured.seconds_by_rank
    apart = bool(steps) and max(steps) > min(steps) * (1 + 2 * measured.noise)
    parts = [f"peak {', '.join(peaks)}"] if len({*peaks}) > 1 else []
    parts += [f"step {', '.join(map(seconds, steps))}"] if apart else []
    return f"by rank: {'; '.join(parts)}" if parts else ""


def compared(ours: Measurement | Prediction, other: Measurement | Prediction, name: str) -> str:
    """``4.6 % slower than saving everything (±1.2 %)``; inside the noise ``about as fast as saving everything (±2 %)``.

    The interval is that of both medians together.
    """
    if not ours.step_seconds or not other.step_seconds:
        return f"step time compared with {name} unknown"
    noise = math.hypot(ours.noise, other.noise)
    within = "" if noise == 0 else " (±?)" if noise >= USELESS_NOISE else f" (±{_percent(noise)})"
    less = 1 - ours.step_seconds / other.step_seconds
    if abs(less) <= max(noise, NO_DIFFERENCE):
        return f"{'about ' if noise else ''}as fast as {name}{within}"
    return f"{_percent(less)} {'faster' if less > 0 else 'slower'} than {name}{within}"


def _percent(value: float) -> str:
    value = abs(value) * 100
    return f"{value:.0f} %" if value >= 9.95 else f"{value:.1f} %"


def counted(number: int, noun: str) -> str:
    """``1 trial``, ``3 trials``, ``12,345 ops``."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"


def facts(settings: Mapping[str, object]) -> str:
    """Settings in one line: ``dtype fp32, batch size 4``; what is off or unknown is left out."""
    parts = []
    for key, value in settings.items():
        name = key.replace("_", " ")
        if value is True:
            parts.append(name)
        elif value is not None and value is not False and value != "":
            parts.append(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}")
    return ", ".join(parts)


def strip(choices: Mapping[str, Choice], width: int = 48, units: Iterable[str] = ()) -> str:
    """A plan in one line, a letter per outermost unit in their order: ``.`` save, ``R`` recompute, ``O`` offload, ….

    ``units`` come first and save where nothing is chosen for them: with those of several plans, all have one length.
    A unit that saves but has choices on its sub-units shows the first of those in lower case. What is longer than
    ``width`` is written in runs: ``.×12 R×20``.
    """
    choices = {**dict.fromkeys(units, SAVE), **choices}
    inner = {}
    for name, choice in choices.items():
        outer = [a for a in ancestors(name) if a in choices]
        if outer and choice.kind != "save":
            inner.setdefault(outer[-1], choice.letter.lower())
    shown = {name: choices[name].letter for name in outermost(choices)}
    letters = [inner.get(name, ".") if letter == "." else letter for name, letter in shown.items()]
    if len(letters) <= width:
        return "".join(letters)
    return " ".join(f"{letter}×{len(list(run))}" for letter, run in groupby(letters))


def strip_and_tally(choices: Mapping[str, Choice]) -> str:
    """A plan in one line, and what its letters mean: ``RR...   3 save (.), 2 recompute (R)``."""
    return f"{strip(choices)}   {tally(choices, letters=True)}"


def letters(plans: Iterable[Mapping[str, Choice]]) -> list[tuple[str, str]]:
    """The letters that plans in one line may have, each with the name of its choice."""
    kinds = {choice.kind for choices in plans for choice in choices.values()} | {"save"}
    return [(t.letter, kind) for kind, t in CHOICE_TYPES.items() if kind in kinds]


def tally(choices: Mapping[str, Choice], *, letters: bool = False) -> str:
    """``12 recompute, 20 save``: how many units do what, the most first; with ``letters`` ``12 recompute (R)``."""
    counts = Counter(f"{choice.kind} ({choice.letter})" if letters else choice.kind for choice in choices.values())
    if gathered := sum(choice.gathered for choice in choices.values()):
        counts["gathered"] = gathered
    return ", ".join(f"{n} {kind}" for kind, n in counts.most_common())


_ERRORS = {
    "cuda": "Of 29 published steps on single busy NVIDIA GPUs nine of ten were simulated within 8 %, 1 % too short in "
    "the median and 17 % at worst; the rates were fitted to some of them.",
    "cpu": "Simulated steps of nine models on one CPU were 8 to 20 % too short.",
}
_UNKNOWN = "How far simulated steps on this kind of device are off is not known: none was measured."


def step_note(environment: Environment | None, workload: WorkloadSpec | None) -> str:
    """Sentences to print with a simulated step time; empty where steps are not simulated for a described device."""
    if environment is None or "simulated" not in environment.versions:
        return ""
    parts = [_ERRORS.get(environment.device.kind, _UNKNOWN)]
    if workload is not None and (workload.shard is not None or workload.ddp is not None):
        parts.append(
            "Collectives take what the links within one machine are said to give; none was measured, and steps that "
            "others published for 8 GPUs were simulated up to 33 % too short."
        )
    return " ".join(parts)
