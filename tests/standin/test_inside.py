from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

INSIDE = [f"tests/standin/inside/check_{name}.py" for name in ("device", "measuring", "streams", "sentinels")]
CONTRACT = "tests/policies/test_contract.py"
SOME = "(two_steps or autograd_grad or exception) and (offload or recompute) and (gpt2 or cnn)"


def test_the_stand_in_and_a_part_of_the_contract(inside):
    """In one process, whose start takes longer than most of them.

    The first file imports transformers: garbage collections in the next ones then need not look through it, see
    ``tests.conftest``.
    """
    inside(*INSIDE, CONTRACT, "-k", f"(check_ and not live) or ({SOME})")
