"""Answers that are kept stay as they are; where a better one is found, it is kept in its place."""

import json

import pytest
import transformers

from tests.tuning.golden.cases import ANSWERS, CASES, MADE_UP, answer, compared

pytestmark = pytest.mark.slow

KNOWN = json.loads(ANSWERS.read_text())
OLDER = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
as_kept = pytest.mark.skipif(
    OLDER, reason="the answers are kept for transformers 5.23; models of 5.17 run some other ops"
)
QUICK = [*MADE_UP, *(pytest.param(name, marks=as_kept) for name, case in CASES.items() if not case.slow)]


def test_every_question_has_an_answer() -> None:
    assert set(KNOWN) == {*CASES, *MADE_UP}


@pytest.mark.parametrize("name", QUICK)
def test_answers_are_the_same(name: str) -> None:
    assert compared(answer(name), KNOWN[name]) == "same"


@as_kept
@pytest.mark.campaign
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.slow])
def test_answers_that_take_a_while_are_the_same(name: str) -> None:
    assert compared(answer(name), KNOWN[name]) == "same"
