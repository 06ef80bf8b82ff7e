"""Plan files that somebody wrote wrongly by hand: what is said, with the line, and what to do."""

from __future__ import annotations

from pathlib import Path

from autockpt import Plan
from autockpt.schema.choices import CHOICE_TYPES

MIXED = """  h.0: {kind: remake, within: [mlp]}
  h.1: offload
smaller_batches:
- when: {tokens: 4096}
  choices: {h.0: save, h.1: recompute}
"""


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
