"""Whole diagnoses of a tiny model, ghost-run."""

from pathlib import Path

import pytest

from autockpt.analysis.diagnose import advice_of, diagnose, room_of
from autockpt.analysis.oom_log import LogReading, read_text
from autockpt.errors import UsageError
from autockpt.schema import Hardware, Plan, WorkloadSpec
from autockpt.shipped import load_hardware
from tests.analysis.logs import FORWARD, message
from tests.tuning.small import TWO_LAYERS, fewer_alternatives

pytestmark = pytest.mark.usefixtures("few_choices")

MIB, GIB = 2**20, 2**30
SPEC = WorkloadSpec(model=TWO_LAYERS, batch_size=32, seq_len=128)


@pytest.fixture(scope="module")
def plain_peak(few_choices: None) -> int:
    """Simulated peak of the job without a plan, context included, on a card with lots of room."""
    bare = read_text("RuntimeError: CUDA error: out of memory\n")
    said = diagnose(bare, SPEC, hardware=load_hardware("rtx4090"))
    assert said.outcome is not None and not said.outcome.binding and "by itself it fits" in said.agreement
    return sum(h.peak_bytes for h in said.holdings)


def crowded(peak: int, share: float) -> LogReading:
    """A log of a device with so much of what plain training needs beyond the context; its own context has 100 MiB."""
    total = 100 + (peak - load_hardware("rtx4090").context_bytes) * share / MIB
    figures = {"tried": 2.0, "capacity": total, "free": 1.0, "process": total - 1, "allocated": total - 101}
    return read_text(FORWARD + message(**{name: f"{size:.2f} MiB" for name, size in figures.items()}, cached="0 bytes"))


@pytest.mark.slow
def test_a_plan_for_the_very_device(plain_peak: int, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    said = diagnose(crowded(plain_peak, 0.85), SPEC, plan_out=path)
    assert said.outcome is not None and "it had to fail" in said.agreement
    assert said.outcome.binding and not said.refusal
    ours, budget_bytes = said.outcome.rows[-1].predicted, said.outcome.budget.bytes
    assert ours is not None and ours.peak_bytes <= budget_bytes < plain_peak
    plan = Plan.load(path)
    assert plan.status == "simulated" and said.outcome.plan_path == path
    assert sum(h.peak_bytes for h in said.holdings) > budget_bytes


@pytest.mark.slow
def test_where_no_plan_fits_the_alternatives_do(plain_peak: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer_alternatives(monkeypatch)
    log = crowded(plain_peak, 0.28)
    said = diagnose(log, SPEC)
    assert said.refusal and said.outcome is None and said.alternatives and log.failure and log.failure.capacity
    assert all(way.peak_bytes <= log.failure.capacity for way in said.alternatives)
    assert any("batch size" in way.options or "sequences" in way.options for way in said.alternatives)


def test_a_model_that_cannot_be_built_leaves_the_evidence(tmp_path: Path) -> None:
    spec = WorkloadSpec(model=str(tmp_path / "absent"))
    said = diagnose(read_text(FORWARD + message()), spec)
    assert said.verdict and said.no_plan


@pytest.mark.parametrize(
    ("text", "helps"),
    [
        # 3.77 GiB unused and 2.10 free for 3.42: one block of them would have done
        (message("3.42 GiB", "79.11 GiB", "2.10 GiB", "76.99 GiB", "71.31 GiB", "3.77 GiB"), True),
        (message("8.00 GiB", "79.11 GiB", "2.10 GiB", "76.99 GiB", "71.31 GiB", "3.77 GiB"), False),  # it would not
        (message("20.00 MiB", "79.11 GiB", "9.00 MiB", "79.10 GiB", "78.00 GiB", "90.00 MiB"), False),  # as in any run
        (message("1.00 GiB", "24.00 GiB", "0.50 GiB", "23.00 GiB", "18.00 GiB", "4.00 GiB", backend="HIP"), True),
    ],
)
def test_segments_are_to_expand_where_that_would_help(text: str, helps: bool) -> None:
    assert any("expandable_segments" in line for line in advice_of(read_text(text))) == helps


def room(text: str, hardware: Hardware | None = None, **how: str) -> tuple[int, Hardware, tuple[str, ...]]:
    failure = read_text(text).failure
    assert failure is not None
    return room_of(failure, hardware, **how)


def test_the_device_is_the_one_of_the_message() -> None:
    found, hardware, notes = room(FORWARD + message())
    assert hardware.memory_bytes == found == round(23.52 * GIB)
    assert hardware.context_bytes == round(22.41 * GIB) - round(21.40 * GIB) - round(560.10 * MIB)
    assert hardware.name == "rtx4090"
    assert "nearest" in notes[0] and "rtx4090" in notes[0]


def test_the_nearest_device_computes_in_the_type_of_the_job() -> None:
    names = [room(message(capacity="15.56 GiB"), computes_in=kind)[1].name for kind in ("float16", "bfloat16")]
    assert names[0] == "t4" != names[1]


def test_a_host_without_memory_needs_no_model() -> None:
    assert not diagnose(read_text("/bin/bash: line 1: 12345 Killed                  python train.py\n")).notes


def test_what_others_hold_is_not_there_for_a_plan() -> None:
    found, hardware, _ = room(FORWARD + message(process="12.41 GiB", allocated="11.40 GiB"))
    assert hardware.memory_bytes - found > 9 * GIB
    with pytest.raises(UsageError):
        room(message(capacity="24.00 GiB", free="0 bytes", process="210.00 MiB", allocated="0 bytes", cached="0 bytes"))


def test_the_option_says_what_the_message_does_not() -> None:
    bare, rtx4090 = "RuntimeError: CUDA error: out of memory\n", load_hardware("rtx4090")
    assert room(bare, hardware=rtx4090)[0] == rtx4090.memory_bytes
    with pytest.raises(UsageError):
        room(bare)
