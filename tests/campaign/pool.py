"""Trials in a forked child that is replaced when it dies or hangs; what it was at is then the verdict."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial

import torch

from autockpt.process import ChildDied, ChildSilent
from autockpt.schema.choices import Choice
from tests.campaign.program import Program, draw, source
from tests.campaign.trial import PLANS, Trials, Verdict, observe, plan, quiet_threads
from tests.children import forked, how_it_ended

SECONDS = 60.0
"""A pair that takes longer hangs."""
_PER_CHILD = 4000
Say = Callable[[Verdict], None]


def run_all(numbers: Sequence[int]) -> Iterator[Verdict]:
    """The verdicts of pairs in order, each as soon as it is there."""
    at = 0
    gc.collect()
    gc.freeze()
    while at < len(numbers):
        end = min(len(numbers), at + _PER_CHILD)
        with closing(forked(partial(_some, numbers[at:end]))) as child:
            while at < end:
                try:
                    verdict = child.receive(SECONDS)
                except (ChildDied, ChildSilent) as lost:
                    verdict = _lost(numbers[at], draw(numbers[at] // PLANS), lost)
                    end = at + 1
                yield verdict
                at += 1


def _lost(number: int, program: Program, lost: ChildDied | ChildSilent) -> Verdict:
    """The verdict of a pair whose process is gone: invalid where plain training alone dies, too."""
    word, how = "HANG", f"silent for {SECONDS:.0f} s"
    if isinstance(lost, ChildDied):
        word, how = "CRASH", how_it_ended(lost.code)
        with closing(forked(lambda _: observe(source(program), None))) as child:
            try:
                child.receive(SECONDS)  # it says nothing
            except ChildDied as alone:
                word = "invalid" if alone.code == lost.code else word
            except ChildSilent:
                pass
    return Verdict(number, word, program.families, plan(program, number)[0], program.ordinary, how)


def in_child(number: int, program: Program, choices: dict[str, Choice]) -> Verdict:
    """The verdict of a pair that is given, from a process of its own."""

    def one(say: Say) -> None:
        _quietly()
        say(Trials().run(number, program, choices))

    with closing(forked(one)) as child:
        try:
            return child.receive(SECONDS)
        except (ChildDied, ChildSilent) as lost:
            return _lost(number, program, lost)


def _some(numbers: Sequence[int], say: Say) -> None:
    _quietly()
    trials = Trials()
    for number in numbers:
        say(trials.run(number))


def _quietly() -> None:
    torch.set_num_threads(1)
    quiet_threads()
