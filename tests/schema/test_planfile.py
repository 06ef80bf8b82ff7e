"""Plan files that somebody wrote wrongly by hand: what is said, with the line, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from autockpt import Plan
from autockpt.errors import PlanError
from autockpt.schema.choices import CHOICE_TYPES

MIXED = """  h.0: {kind: remake, within: [mlp]}
  h.1: offload
smaller_batches:
- when: {tokens: 4096}
  choices: {h.0: save, h.1: recompute}
"""
SETS = "  model.layers.0: recompute\nsmaller_batches:\n- when: {tokens: 4096}\n  choices: {model.layers.0: save}\n"


@pytest.mark.parametrize(
    ("choices", "said", "remedy"),
    [
        ("  model.layers.0:\n", ":3: no choice is written here", "Known choices: save"),
        ("  model.layers.2-0: recompute\n", ":3: '2-0' in 'model.layers.2-0' is not", "Write the smaller index first"),
        ("  model.layers.0: recompte\n", ":3: unknown choice 'recompte'", "Did you mean recompute? Known"),
        ("  model.layers.0: {kind: recompte}\n", ":3: unknown choice 'recompte'", "Did you mean recompute? Known"),
        ("  a: {kind: selective, keep: 3}\n", ":3: selective: keep: has to be a list of names", "Its options: keep"),
        ("  a: {kind: segment, size: 0}\n", ":3: segment: size: has to be greater than or equal to 1", "Its options"),
        (SETS.replace("tokens", "token"), ":5: unknown key 'token'", "Did you mean 'tokens'?"),
        (SETS.replace("4096", "-1"), ":5: smaller_batches.0.when.tokens: it has to be greater", "It reads -1 now."),
        (
            SETS + "- when: {tokens: 8}\n  choices: {a: save}\n",
            ":4: smaller_batches go from small to large",
            "Correct it in ",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_line(choices: str, said: str, remedy: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(f"autockpt: 1\nchoices:\n{choices}")
    with pytest.raises(PlanError) as refused:
        Plan.load(path)
    assert f"plan.yaml{said}" in refused.value.message
    assert refused.value.remedy.startswith(remedy)


def test_every_kind_of_choice_in_a_file_has_one_comment(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(f"autockpt: 1\nchoices:\n{MIXED}")
    plan = Plan.load(path)
    text = plan.text()
    path.write_text(text)
    assert Plan.load(path) == plan
    comments = " ".join(text.replace("\n#   ", " ").split())
    for kind, cls in CHOICE_TYPES.items():
        assert comments.count(f"# {kind}: {cls.says}") == (kind in ("save", "recompute", "remake", "offload")), kind
    assert "within: modules" in comments and "keep: modules" not in comments
