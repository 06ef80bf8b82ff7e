import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from autockpt.errors import PlanError, UsageError
from autockpt.schema.base import Data
from autockpt.schema.yaml import parse, read


class Sample(Data):
    name: str
    size: int = 0
    inner: dict[str, int] = Field(default_factory=dict)


def test_every_part_knows_its_line() -> None:
    document = parse("a: 1\n\nb:\n  c:\n    - x\n    - y: 2\n", "f.yaml")
    assert document.where("b", "c", 1, "y") == "f.yaml:6"
    assert document.where("b", "c", 0) == "f.yaml:5"
    assert document.where("b", "nothing") == "f.yaml:3"
    assert document.where("nothing") == "f.yaml:1"


def test_names_stay_text_and_nothing_becomes_a_date() -> None:
    text = "0: x\nno: 2024-01-01\nb: true\nf: 1.5\ng: -3\nh: null\n"
    data = {"0": "x", "no": "2024-01-01", "b": True, "f": 1.5, "g": -3, "h": None}
    assert parse(text, "f.yaml").data == data


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", 3),
        ("a: 1\nb: {c: 1, c: 2}\n", 2),
        ("a: &x 1\nb: *x\n", 1),
        ("a: 1\n*: save\n", 2),
        ("a: !!python/object:os.system {}\n", 1),
        ("a: 1\n---\nb: 2\n", 2),
        ("a: [1, 2\nb: 3", 2),
        ("a: [1, 2\n", 2),
        ("a: 1\n b: 2\n", 2),
        ("a: 1\n? [1, 2]\n: 3\n", 2),
        ("a: b\n\tc: d\n", 2),
        ("choices:\n  **.mlp: recompute\n", 2),
    ],
)
def test_bad_files_are_errors_with_a_line(text: str, line: int) -> None:
    with pytest.raises(PlanError) as caught:
        parse(text, "plan.yaml", PlanError)
    assert caught.value.message.startswith(f"plan.yaml:{line}: ") and caught.value.remedy
    assert "''" not in caught.value.remedy


def test_a_bomb_is_refused_at_once() -> None:
    bomb = "a: &a [x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)},*{chr(97 + i)}]\n" for i in range(20)
    )
    with pytest.raises(UsageError):
        parse(bomb, "f.yaml")
    for text in ("a: " + "x" * 2_000_000, "[" * 5000 + "]" * 5000):
        with pytest.raises(UsageError):
            parse(text, "f.yaml")


@given(st.text(max_size=80))
def test_any_text_parses_or_is_a_usage_error(text: str) -> None:
    try:
        parse(text, "f.yaml")
    except UsageError as error:
        assert error.message.startswith("f.yaml")


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("name: x\nsize: many\n", 2, "size"),
        ("name: x\nsiez: 3\n", 2, "unknown key"),
        ("size: 3\n", 1, "missing"),
        ("name: x\ninner:\n  a: 1\n  b: x\n", 4, "inner.b"),
    ],
)
def test_violations_of_a_data_object_have_their_line(text: str, line: int, word: str) -> None:
    document = parse(text, "f.yaml")
    with pytest.raises(UsageError) as caught:
        document.validate(Sample)
    assert caught.value.message.startswith(f"f.yaml:{line}: ") and word in caught.value.message


def test_unreadable_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        read(tmp_path / "missing.yaml")
    with pytest.raises(UsageError):
        read(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(UsageError):
        read(tmp_path / "binary.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(UsageError, match=r"pipe.yaml cannot be read: .* a pipe"):
        read(tmp_path / "pipe.yaml")
