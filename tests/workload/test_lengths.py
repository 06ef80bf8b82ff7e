"""Lengths read off data, and batches cut to them."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from autockpt.errors import UsageError
from autockpt.schema.lengths import Lengths
from autockpt.workload import Step
from autockpt.workload.lengths import lengths_of, parse_lengths, shortened
from tests.policies.zoo import CASES

ROWS = [{"input_ids": list(range(n))} for n in (3, 9, 4, 4)]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(r["input_ids"]) for r in rows)
    return {"input_ids": torch.tensor([r["input_ids"] + [0] * (longest - len(r["input_ids"])) for r in rows])}


def test_of_rows_and_of_batches() -> None:
    wanted = {3: 1, 4: 2, 9: 1}
    tensors = [torch.zeros(n, dtype=torch.long) for n in (3, 9, 4, 4)]
    for source in (
        ROWS,
        tensors,
        [3, 9, 4, 4],
        torch.tensor([3, 9, 4, 4]),
        [list(range(n)) for n in (3, 9, 4, 4)],
        iter(ROWS),
    ):
        assert lengths_of(source).counts == wanted and lengths_of([9]).of == "rows"
    before = torch.get_rng_state()
    found = lengths_of(DataLoader(ROWS, batch_size=2, collate_fn=padded, shuffle=True))  # type: ignore[arg-type]
    assert torch.equal(before, torch.get_rng_state())
    assert found.of == "batches" and sum(found.counts.values()) == 2 and found.longest == 9
    assert lengths_of([padded(ROWS[:2])]).of == "batches"


def test_what_has_no_length_is_refused() -> None:
    for source in ([], [object()], 7, [{"text": 1}]):
        with pytest.raises(UsageError) as caught:
            lengths_of(source)
        assert caught.value.remedy


def test_a_step_is_cut_to_shorter_rows() -> None:
    case = CASES["llama"]
    step = Step(case.make(), case.batch(), accumulate=2)
    short = shortened(step, 5)
    assert {tuple(t.shape) for t in short.batch.values()} == {(4, 5)}
    assert short.settings["seq_len"] == 5 and short.accumulate == 2 and step.settings["seq_len"] == 48
    short.cycle()
    row = Step(step.model, {name: tensor[:1].clone() for name, tensor in step.batch.items()})
    cut = row.resident_bytes() - shortened(row, 5).resident_bytes()  # a cut row is contiguous, and a view without care
    assert cut == sum((48 - 5) * tensor.element_size() for tensor in row.batch.values())
    with pytest.raises(UsageError):
        shortened(step, 49)


@given(st.dictionaries(st.integers(1, 1 << 20), st.integers(1, 1 << 20), min_size=1, max_size=300))
def test_what_is_written_is_read(counts: dict[int, int]) -> None:
    wanted = Lengths(counts=counts)
    assert parse_lengths(",".join(f"{n}:{c}" for n, c in counts.items())) == wanted
    assert Lengths.model_validate_json(wanted.model_dump_json()) == wanted
    assert list(wanted.counts) == sorted(counts) and wanted.longest == max(counts)


def test_a_lengths_file_holds_lengths_or_lengths_and_counts(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("12\n12\n\n# a remark\n400 7\n5,1 # rare\n")
    assert parse_lengths(str(file)).counts == {5: 1, 12: 2, 400: 7}


@pytest.mark.parametrize("wrong", ["12\n-3\n", "12 x\n", "", "0:4", "1.5", "17000000", "17000000000"])
def test_other_files_are_refused_with_their_line(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(wrong)
    with pytest.raises(UsageError) as caught:
        parse_lengths(str(file))
    assert str(file) in caught.value.message and caught.value.remedy
    with pytest.raises(UsageError):
        parse_lengths(str(tmp_path / "none"))
    os.mkfifo(tmp_path / "pipe")
    for endless in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(UsageError):
            parse_lengths(endless)
