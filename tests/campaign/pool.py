"""Pairs in forks, one for each program; where one dies or hangs, that is the verdict of the pair it was at."""

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from autockpt.schema.choices import Choice
from tests.campaign.program import Program, draw, source
from tests.campaign.trial import PLANS, Trials, Verdict, observe, plan
from tests.children import Say, each_forked

SECONDS = 60.0
"""A pair that takes longer hangs."""


def run_all(numbers: Sequence[int]) -> Iterator[Verdict]:
    """The verdicts of pairs in order."""
    todo = deque(list(pairs) for _, pairs in itertools.groupby(numbers, lambda number: number // PLANS))
    for fork in each_forked(todo, _some, seconds=SECONDS):
        yield from fork.said
        if fork.ended and (left := fork.item[len(fork.said) :]):
            yield _lost(left[0], draw(left[0] // PLANS), fork.ended)
            todo.extendleft([left[1:]] if left[1:] else [])


def in_child(number: int, program: Program, choices: dict[str, Choice]) -> Verdict:
    """The verdict of a pair that is given, from a process of its own."""

    def one(program: Program, say: Say) -> None:
        _quietly()
        say(Trials().run(number, program, choices))

    (fork,) = each_forked(deque([program]), one, seconds=SECONDS)
    return fork.said[0] if fork.said else _lost(number, program, fork.ended)


def _lost(number: int, program: Program, how: str) -> Verdict:
    """The verdict of a pair whose process is gone: invalid where plain training alone ends so, too."""
    (alone,) = each_forked(deque([program]), lambda program, say: observe(source(program), None), seconds=SECONDS)
    word = "invalid" if alone.ended == how else "HANG" if how.startswith("silent") else "CRASH"
    return Verdict(number, word, program.families, plan(program, number)[0], program.ordinary, how)


def _some(numbers: Sequence[int], say: Say) -> None:
    _quietly()
    trials = Trials()
    for number in numbers:
        say(trials.run(number))


def _quietly() -> None:
    torch.set_num_threads(1)
    threading.excepthook = lambda args: None  # errors in threads of programs are for the program alone
