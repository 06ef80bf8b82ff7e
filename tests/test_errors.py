from __future__ import annotations

import pytest

from autockpt.errors import how_it_ended


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "signal SIGKILL"), (-40, "signal 40")]
)
def test_ends_of_processes_in_words(code: int, words: str) -> None:
    assert how_it_ended(code) == words
