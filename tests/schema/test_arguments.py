"""The door of Python: arguments of the wrong kind are refused by name at once, errors say what options are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import nn

from autockpt.errors import InfeasibleError, UsageError
from autockpt.schema.arguments import OPTIONS_IN_PYTHON, checked, python_door
from autockpt.schema.workload import WorkloadSpec


@pytest.mark.parametrize(
    ("message", "named"), [("use a smaller --batch-size", True), ("use fewer rows - or less", False)]
)
def test_errors_say_once_what_an_option_is_called_in_python(message: str, named: bool) -> None:
    @python_door
    def inner() -> None:
        raise InfeasibleError(message, remedy="Do it.", smallest_peak=7)

    @python_door
    def search() -> None:
        inner()

    with pytest.raises(InfeasibleError) as caught:
        search()
    assert caught.value.message == message and caught.value.smallest_peak == 7
    assert caught.value.remedy.count(OPTIONS_IN_PYTHON) == named and caught.value.remedy.startswith("Do it.")


@checked
def asked(
    model: nn.Module,
    *,
    timeout: float | None = None,
    sizes: Sequence[int] = (1,),
    out: str | Path = ".",
    steps: Literal["layers", "model"] | None = None,
    **more: Any,
) -> tuple[Any, ...]:
    """What a function gets to see of its arguments."""
    return timeout, sizes, out, more


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"timeout": "10m"}, "timeout='10m' is of type str"),
        ({"sizes": 8}, "sizes=8 is of type int"),
        ({"sizes": ["a"]}, r"sizes=\['a'\] is of type list"),
        ({"steps": "yes"}, "steps='yes' is of type str"),
        ({"out": None}, "out=None is of type NoneType"),
        ({"out": nn.ReLU()}, "out=<ReLU> is of type ReLU"),
        ({"timeout": "9" * 5000 + "x"}, "timeout='9{56}…"),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name(given: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=f"^{word}") as caught:
        asked(nn.ReLU(), **given)
    assert next(iter(given)) in caught.value.remedy and len(caught.value.message) < 120


def test_what_fits_arrives_as_it_was_given_and_what_stands_for_it_as_that() -> None:
    sizes = [1, 2]
    timeout, seen, out, more = asked(nn.ReLU(), timeout=3, sizes=sizes, out=Path("x"), units=7)
    assert (timeout, seen, out, more) == (3, [1, 2], Path("x"), {"units": 7}) and seen is sizes
    assert asked("a model is not looked at here", timeout="3")[0] == 3  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        asked()  # type: ignore[call-arg]


def test_what_an_argument_takes_is_told_as_people_write_it() -> None:
    taken = {"steps": "'layers' | 'model' | None", "out": "str | Path", "sizes": "Sequence[int]"}
    for name, words in taken.items():
        with pytest.raises(UsageError) as caught:
            asked(nn.ReLU(), **{name: 7.5})  # type: ignore[arg-type]
        assert caught.value.remedy == f"What {name}= takes: {words}."


def test_errors_of_a_generator_and_of_a_data_object_are_told_in_the_same_words() -> None:
    @python_door
    def rows() -> Iterator[int]:
        yield 1
        raise UsageError("--seq-len 3 is too short")

    @python_door
    def spec(seq_len: int) -> WorkloadSpec:
        return WorkloadSpec(model="x", seq_len=seq_len)

    found = rows()
    assert next(found) == 1
    with pytest.raises(UsageError, match=r"^--seq-len 3 is") as caught:
        next(found)
    assert caught.value.remedy == OPTIONS_IN_PYTHON
    with pytest.raises(UsageError, match="seq_len=-1: it has to be greater than 0"):
        spec(-1)
