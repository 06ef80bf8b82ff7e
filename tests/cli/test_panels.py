from __future__ import annotations

import pytest

from tests.cli.conftest import Autockpt


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        (
            "--batch-size",
            "auto",
            "a whole number is needed; the one that trains fastest is found with --global",
        ),
        ("--batch-size", "0", "it has to be at least 1."),
        ("--global-batch", "x", "a whole number is needed."),
    ],
)
def test_what_a_value_has_to_be_is_said_in_plain_words(autockpt: Autockpt, option: str, value: str, said: str) -> None:
    result = autockpt("search", "--model", "llama-tiny", "--budget", "1GB", option, value)
    assert result.code == 2 and option in result.err and said in result.err


def test_what_is_missing_is_named(autockpt: Autockpt) -> None:
    result = autockpt("export", "plan.yaml")
    assert result.code == 2 and result.err.rstrip().endswith("Missing option '--to'.")
