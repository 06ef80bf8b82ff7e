from __future__ import annotations

import pytest

from autockpt.cli.app import VERBS
from autockpt.cli.options import workload_spec
from autockpt.errors import UsageError
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
        ("--max-grad-norm", "x", "a number is needed."),
    ],
)
def test_what_a_value_has_to_be_is_said_in_plain_words(autockpt: Autockpt, option: str, value: str, said: str) -> None:
    result = autockpt("search", "--model", "llama-tiny", "--budget", "1GB", option, value)
    assert result.code == 2 and option in result.err and said in result.err


def test_only_what_can_simulate_a_device_takes_options_that_no_real_step_follows(autockpt: Autockpt) -> None:
    for verb in VERBS:
        text = autockpt(verb.__name__, "--help").out
        assert ("--shard" in text) is (verb.__name__ in ("search", "explain", "diagnose")), verb.__name__
        assert "--shard" not in text or "--hardware" in text


def test_what_is_missing_is_named(autockpt: Autockpt) -> None:
    result = autockpt("export", "plan.yaml")
    assert result.code == 2 and result.err.rstrip().endswith("Missing option '--to'.")


def test_so_it_is_where_the_workload_looks_at_a_value() -> None:
    with pytest.raises(UsageError, match=r"--seq-len long: a whole number is needed\nTokens of the longest sequence"):
        workload_spec({"model": "x", "seq_len": "long"})


def test_a_seed_that_numpy_does_not_take_is_refused() -> None:
    with pytest.raises(UsageError, match="--seed 4294967296: it has to be less than 4294967296"):
        workload_spec({"model": "x"}, seed=1 << 32)
