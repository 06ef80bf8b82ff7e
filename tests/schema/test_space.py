from __future__ import annotations

from pathlib import Path

import pytest

from autockpt.errors import UsageError
from autockpt.schema import SearchSpace
from autockpt.schema.choices import searched_kinds
from autockpt.shipped import FOLDER, load_space


def test_all_shipped_spaces_load() -> None:
    names = [path.stem for path in (FOLDER / "spaces").glob("*.yaml")]
    assert "knobs" in names
    for name in names:
        space = load_space(name)
        assert space.name == name and space.choices == searched_kinds() and space.description
        for knob in space.knobs.values():
            assert knob.neutral is not None


def test_fewer_choices_take_their_knobs_along() -> None:
    space = load_space("knobs").restricted(("recompute",))
    assert space.choices == ("save", "recompute") and set(space.knobs) == {"margin", "recompute_price"}
    with pytest.raises(UsageError):
        space.restricted(("recompte",))
    with pytest.raises(UsageError):
        space.restricted(("save",))
    for kind, option in (("chunked_loss", "--allow-inexact"), ("compile_budget", "--compile")):
        with pytest.raises(UsageError) as refused:
            space.restricted((kind,))
        assert option in refused.value.remedy


def test_ones_own_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("search_space: 1\nchoices: [recompute]\nknobs:\n  margin: {low: 0, high: 0.1}\n")
    space = load_space(str(path))
    assert (space.name, space.choices) == ("mine", ("save", "recompute"))
    assert SearchSpace.model_validate_json(space.model_dump_json()) == space


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("choices: [recompute]\n", 1, "search_space"),
        ("search_space: 2\n", 1, "search_space"),
        ("search_space: 1\nchoices: [recompte]\n", 2, "recompte"),
        ("search_space: 1\nmargins: [1.5]\n", 2, "margins"),
        ("search_space: 1\nknobs:\n  margin: {low: 1, high: 0}\n", 3, "low"),
        ("search_space: 1\nknobs:\n  margin: {low: 0, high: 1, log: true}\n", 3, "zero"),
        ("search_space: 1\nknobs:\n  speed: {low: 0, high: 1}\n", 3, "speed"),
        ("search_space: 1\nknobs:\n  margin: {low: 0.0, high: .inf}\n", 3, "finite"),
        ("search_space: 1\n", 1, "knobs"),
    ],
)
def test_bad_spaces_are_errors_with_a_line(tmp_path: Path, text: str, line: int, word: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_space(str(path))
    assert caught.value.message.startswith(f"{path}:{line}: ") and word in caught.value.message


def test_an_unknown_name_suggests_one() -> None:
    with pytest.raises(UsageError) as caught:
        load_space("knob")
    assert "Did you mean knobs?" in caught.value.remedy
    with pytest.raises(UsageError):
        load_space("./missing.yaml")
