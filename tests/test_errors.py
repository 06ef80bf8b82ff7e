from __future__ import annotations

import pytest

from autockpt.errors import InfeasibleError, how_it_ended, in_python, python_door


@pytest.mark.parametrize(
    ("option", "argument"),
    [
        ("use a smaller --batch-size (with --accumulate to keep its effect)", "batch_size= (with accumulate= to keep"),
        ("--batch-size 2 --accumulate 8 --allow-inexact", "batch_size=2 accumulate=8 allow_inexact=True"),
        ("Raise --host-budget, --timeout or --trials.", "Raise host_budget=, timeout= or trials=."),
        ("--optimizer sgd, --lora RANK, --seq-len 512", "optimizer=sgd, lora=RANK, seq_len=512"),
        ("--load-in-4bit and --load-in-8bit exclude", "load_in_4bit=True and load_in_8bit=True exclude"),
        ("Search without --compile. A dash -- is none.", "Search without compile=. A dash -- is none."),
        ("Run `autockpt verify --device cpu` first.", "Run `autockpt verify --device cpu` first."),
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


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "signal SIGKILL"), (-40, "signal 40")]
)
def test_ends_of_processes_in_words(code: int, words: str) -> None:
    assert how_it_ended(code) == words
