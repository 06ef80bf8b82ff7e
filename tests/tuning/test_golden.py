"""Answers that are kept stay as they are; where a better one is found, it is kept in its place."""

from __future__ import annotations

import json

import pytest

from autockpt.profiling.cuda_memory import workspaces_stay
from search_spaces.hardware import load_hardware
from tests.tuning.golden.cases import ANSWERS, CASES, MADE_UP, answer, compared

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not workspaces_stay(load_hardware("rtx4090")),
        reason="the answers are kept for torch up to 2.14, where CUDA's matrix workspaces stay once they are taken",
    ),
]

KNOWN = json.loads(ANSWERS.read_text())
QUICK = [*MADE_UP, *(name for name, case in CASES.items() if not case.slow)]


def test_every_question_has_an_answer() -> None:
    assert set(KNOWN) == {*CASES, *MADE_UP}


@pytest.mark.parametrize("name", QUICK)
def test_answers_are_the_same(name: str) -> None:
    assert compared(answer(name), KNOWN[name]) == "same"


@pytest.mark.campaign
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.slow])
def test_answers_that_take_a_while_are_the_same(name: str) -> None:
    assert compared(answer(name), KNOWN[name]) == "same"
