"""``autockpt estimate``: one simulated row after the other."""

import pytest

import autockpt
from autockpt.cli.estimate import print_estimates
from autockpt.errors import UsageError, WorkloadError
from autockpt.schema import Estimate, parse_size
from autockpt.shipped import load_hardware
from autockpt.tuning.estimates import remark
from tests.errors import raises
from tests.samples import printed
from tests.tuning.small import TWO_LAYERS


@pytest.fixture
def small_card(tmp_path, monkeypatch):
    """An RTX 4090 with little memory: saving everything does not fit."""

    def make(size: str) -> None:
        card = load_hardware("rtx4090").model_copy(update={"memory_bytes": parse_size(size)})
        monkeypatch.setattr("autockpt.tuning.estimates.load_hardware", lambda name: card)

    return make


@pytest.mark.slow
def test_rows_come_one_by_one_with_a_plan_where_one_is_needed(small_card):
    small_card("590MB")
    rows = autockpt.estimate(
        "gpt2-tiny", cards=["small"], batch_sizes=[1, 64], seq_lens=[64], lora=2, full=False, qlora=False
    )
    small = next(rows)
    assert small.fits and not small.choices and small.step_seconds and small.lora == 2
    large = next(rows)
    assert large.batch_size == 64 and large.fits and sum(large.choices.values()) > 0
    assert small.peak_bytes and large.peak_bytes
    assert small.peak_bytes < large.peak_bytes <= 0.95 * parse_size("590MB"), "a simulation leaves headroom"
    assert next(rows, None) is None
    (image,) = autockpt.estimate("vit-tiny", cards=["small"], lora=0)
    assert image.fits and (image.batch_size, image.seq_len) == (1, None), "an image has no length"


@pytest.mark.slow
def test_what_is_said_to_be_needed_is_the_least_that_suffices(small_card):
    def row(size: int) -> Estimate:
        small_card(f"{size / 1e6}MB")
        (found,) = autockpt.estimate(TWO_LAYERS, cards=["small"], batch_sizes=[64], seq_lens=[64], lora=0)
        return found

    lean = row(500_000_000)
    assert not lean.fits and lean.lora is None and lean.step_seconds is None
    needed = lean.smallest_peak
    assert needed and row(int(needed / 0.95 * 1.001)).fits and not row(int(needed / 0.95 * 0.985)).fits


def estimated(batch: int, length: int, peak: int, seconds: float = 1.0, fits: bool = True, **more: int) -> Estimate:
    sizes = {"peak_bytes": peak, "step_seconds": seconds} if fits else {"smallest_peak": peak}
    row = {"model": "m", "card": "c", "batch_size": batch, "seq_len": length, "fits": fits, "choices": more}
    return Estimate.model_validate({**row, **sizes})


@pytest.mark.parametrize(
    ("row", "other", "says"),
    [
        (estimated(1, 64, 5), estimated(1, 32, 5), ""),
        (estimated(1, 64, 5), estimated(2, 32, 9), ""),  # neither is the larger one
        (estimated(1, 64, 5, recompute=2), estimated(1, 32, 9), "needs less than 1×32: with another plan"),
        (estimated(1, 32, 9), estimated(1, 64, 5, recompute=2), "needs more than 1×64: with another plan"),
        (estimated(1, 64, 5, fits=False), estimated(1, 32, 9, fits=False), "by how the allocator's memory divides"),
        (estimated(1, 64, 9, 0.5), estimated(1, 32, 5), "takes less than 1×32: by the kernels"),
    ],
)
def test_what_does_not_grow_with_batch_and_length_says_why(row: Estimate, other: Estimate, says: str) -> None:
    found = remark(row, [other])
    assert says in found and bool(says) == bool(found)


@pytest.mark.slow
def test_a_base_in_four_bits_is_a_row_of_its_own():
    pytest.importorskip("bitsandbytes", reason="4 bits need bitsandbytes")
    rows = autockpt.estimate(TWO_LAYERS, batch_sizes=[2], seq_lens=[64], lora=2, full=False, dtype="bf16")
    whole, quantised = rows
    assert quantised.load_in_4bit and not whole.load_in_4bit and whole.lora == quantised.lora == 2
    assert whole.fits and quantised.fits and not quantised.note


def test_wrong_questions_are_refused_at_once():
    with raises(UsageError, "int3"):
        autockpt.estimate("gpt2-tiny", dtype="int3")  # type: ignore[arg-type]
    with raises(UsageError, "rtx9999"):
        autockpt.estimate("gpt2-tiny", cards=["rtx9999"])
    with raises(WorkloadError, "lama-8b"):
        next(autockpt.estimate(["llama-tiny", "./lama-8b"]))
    with raises(UsageError):
        autockpt.estimate("llama-tiny", cards=())
    with raises(UsageError):
        next(autockpt.estimate("llama-tiny", full=False, lora=0))


def test_a_row_that_cannot_be_had_says_what_to_do():
    (row,) = autockpt.estimate("builtins:dict", lora=0)
    assert not row.fits and "--batch-size has no effect" in row.note and "parameter named batch_size" in row.note


def test_the_table_fits_eighty_columns():
    common = {"model": "gpt-oss-20b", "card": "rtx6000-ada", "batch_size": 16, "seq_len": 32768, "fits": False}
    plan = {"fits": True, "peak_bytes": 47 << 30, "step_seconds": 0.7, "choices": {"recompute": 24}}
    rows = [
        common | {"lora": 16, "load_in_4bit": True} | plan,
        common | {"smallest_peak": 83770359152},
        common | {"note": "the hardware gives no rate for bfloat16 products " * 3},
    ]
    lines = printed(print_estimates, map(Estimate.model_validate, rows)).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "QLoRA 16" in lines[1]
    assert "~yes  ~47.0 GiB   ~700 ms" in lines[1] and "24 recompute" in lines[2]
    assert "~no   ~78.0 GiB" in lines[3] and "simulated" in lines[-1]
