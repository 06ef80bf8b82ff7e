from __future__ import annotations

import pytest

from autockpt.errors import InfeasibleError, in_python, python_door


@pytest.mark.parametrize(
    ("option", "argument"),
    [
        ("use a smaller --batch-size (with --accumulate to keep its effect)", "batch size (with accumulate= to keep"),
        ("--batch-size 2 --accumulate 8 --allow-inexact", "batch size 2 accumulate=8 allow_inexact=True"),
        ("Raise --host-budget, --timeout or --trials.", "Raise host_budget=, timeout= or trials=."),
        ("--optimizer sgd, --lora 16, --seq-len 512", "optimizer=sgd, LoRA of rank 16, sequence length 512"),
        ("Search without --compile. A dash -- is none.", "Search without --compile. A dash -- is none."),
    ],
)
def test_errors_in_python_name_arguments(option: str, argument: str) -> None:
    assert argument in in_python(option)

    @python_door
    def search() -> None:
        raise InfeasibleError(option, remedy=option, smallest_peak=7)

    with pytest.raises(InfeasibleError) as caught:
        search()
    assert argument in caught.value.message and argument in caught.value.remedy and argument in str(caught.value)
    assert caught.value.smallest_peak == 7
