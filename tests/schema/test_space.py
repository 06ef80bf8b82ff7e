from autockpt.schema import SearchSpace
from autockpt.schema.choices import searched_kinds


def test_all_searched_choices_are_tried_unless_restricted() -> None:
    assert SearchSpace().choices == searched_kinds()
    few = SearchSpace(choices=("save", "recompute"), head=(), gathered=False)
    assert SearchSpace().restricted(("recompute",)) == few
    assert SearchSpace().restricted(("recompute", "gathered")) == few.model_copy(update={"gathered": True})
    less = SearchSpace().without(("recompute",))
    assert less.choices == tuple(k for k in searched_kinds() if k != "recompute") and less.gathered
