"""The door of Python: arguments of the wrong kind are refused by name at once, errors say what options are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import nn

from autockpt.errors import UsageError
from autockpt.schema.arguments import OPTIONS_IN_PYTHON, python_door
from autockpt.schema.workload import WorkloadSpec


@python_door
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
    "given",
    [
        {"timeout": "10m"},
        {"sizes": 8},
        {"sizes": ["a"]},
        {"steps": "yes"},
        {"out": None},
        {"out": nn.ReLU()},
        {"timeout": "9" * 5000 + "x"},
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        asked(nn.ReLU(), **given)
    assert caught.value.message.startswith(f"{next(iter(given))}=") and len(caught.value.message) < 240


def test_arguments_that_fit_arrive_unchanged() -> None:
    sizes = [1, 2]
    timeout, seen, out, more = asked(nn.ReLU(), timeout=3, sizes=sizes, out=Path("x"), units=7)
    assert (timeout, seen, out, more) == (3, [1, 2], Path("x"), {"units": 7}) and seen is sizes
    assert asked("a model is not looked at here", timeout="3")[0] == 3  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        asked()  # type: ignore[call-arg]


def test_generators_and_data_objects_fail_in_the_same_words() -> None:
    @python_door
    def rows() -> Iterator[int]:
        yield 1
        raise UsageError("--seq-len 3 is too short")

    @python_door
    def spec(seq_len: int) -> WorkloadSpec:
        return WorkloadSpec(model="x", seq_len=seq_len)

    found = rows()
    assert next(found) == 1
    with pytest.raises(UsageError) as caught:
        next(found)
    assert caught.value.remedy == OPTIONS_IN_PYTHON
    with pytest.raises(UsageError):
        spec(-1)
