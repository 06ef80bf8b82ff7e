from __future__ import annotations

import pytest

from autockpt.errors import UsageError
from autockpt.schema import SearchSpace
from autockpt.schema.choices import searched_kinds


def test_all_searched_choices_are_tried_unless_restricted() -> None:
    assert SearchSpace().choices == searched_kinds()
    few = SearchSpace(choices=("save", "recompute"), head=(), gathered=False)
    assert SearchSpace().restricted(("recompute",)) == few
    assert SearchSpace().restricted(("recompute", "gathered")) == few.model_copy(update={"gathered": True})
    less = SearchSpace().without(("recompute",))
    assert less.choices == tuple(k for k in searched_kinds() if k != "recompute") and less.gathered


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("recompte", "Did you mean recompute?"),
        ("save", "Allow recompute"),
        ("chunked_loss", "--allow-inexact"),
        ("compile_budget", "--compile"),
    ],
)
def test_what_cannot_be_searched_is_refused(kind: str, remedy: str) -> None:
    with pytest.raises(UsageError) as refused:
        SearchSpace().restricted((kind,))
    assert remedy in refused.value.remedy
