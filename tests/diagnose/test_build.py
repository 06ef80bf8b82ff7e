"""Whole diagnoses of a tiny model, ghost-run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autockpt.diagnose import DiagnoseRequest, diagnose
from autockpt.diagnose.oom_log import read_text
from autockpt.schema import Plan, WorkloadSpec
from autockpt.schema.diagnosis import LogReading
from search_spaces.hardware import load_hardware
from search_spaces.spaces import load_space
from tests.diagnose.logs import FORWARD, LOSS, message

pytestmark = pytest.mark.slow

MIB = 2**20
SPEC = WorkloadSpec(model="llama-tiny", batch_size=32, seq_len=128)
VOCABULARY = 512


def mib(number: float) -> str:
    return f"{number:.2f} MiB"


@pytest.fixture(scope="module", autouse=True)
def few_choices() -> Iterator[None]:
    """Each choice is some ghost runs more in every answer, and none here depends on which there are."""
    few = load_space("knobs").restricted(("save", "recompute", "offload", "recompute_offload"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("search_spaces.spaces.load_space", lambda name: few)
        yield


@pytest.fixture(scope="module")
def plain_peak(few_choices: None) -> int:
    """Simulated peak of the job without a plan, context included, on a card with lots of room."""
    bare = read_text("RuntimeError: CUDA error: out of memory\n")
    said = diagnose(DiagnoseRequest(log=bare, spec=SPEC, hardware=load_hardware("rtx4090")))
    assert said.agreement is not None and said.fits_already and not said.alternatives
    return said.agreement.simulated_peak


def crowded(peak: int, share: float) -> LogReading:
    """A log of a device with so much of what plain training needs beyond the context; its own context has 100 MiB."""
    total = 100 + (peak - load_hardware("rtx4090").context_bytes) * share / MIB
    figures = {"tried": 2.0, "capacity": total, "free": 1.0, "process": total - 1, "allocated": total - 101}
    return read_text(FORWARD + message(**{name: mib(size) for name, size in figures.items()}, cached="0 bytes"))


def test_a_plan_for_the_very_device(plain_peak: int, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    said = diagnose(DiagnoseRequest(log=crowded(plain_peak, 0.85), spec=SPEC, plan_out=path))
    assert said.room is not None and said.agreement is not None
    assert said.agreement.overflows and said.agreement.stage in ("forward", "loss", "backward")
    assert said.choices and not said.alternatives and not said.fits_already
    ours = said.rows[-1].predicted
    assert ours is not None and ours.peak_bytes <= said.room.budget < plain_peak
    plan = Plan.load(path)
    assert plan.status == "simulated" and said.plan_path == path
    assert sum(h.peak_bytes for h in said.holdings) > said.room.budget


def test_where_no_plan_fits_the_alternatives_do(plain_peak: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autockpt.tuning.alternatives.MOST_RANKS", 1)  # each variant is a ghost run of its own
    monkeypatch.setattr("autockpt.tuning.alternatives._lean_optimizers", lambda *_: iter(()))
    said = diagnose(DiagnoseRequest(log=crowded(plain_peak, 0.28), spec=SPEC))
    assert said.room is not None and not said.choices and said.alternatives
    assert all(way.peak_bytes <= said.room.budget for way in said.alternatives)
    assert said.smallest_peak is not None and said.smallest_peak > said.room.budget
    assert any("batch size" in way.options or "sequences" in way.options for way in said.alternatives)


def test_the_tensor_whose_allocation_failed_is_named() -> None:
    spec = SPEC.model_copy(update={"seq_len": 512})
    logits = 32 * 512 * VOCABULARY * 4
    log = read_text(LOSS + message(tried=mib(logits / MIB)))
    said = diagnose(DiagnoseRequest(log=log, spec=spec, hardware=load_hardware("rtx4090")))
    assert said.agreement is not None
    assert any(t.bytes == logits and t.shape[-1] == VOCABULARY for t in said.agreement.asked)
    assert said.fits_already and "by itself it fits" in said.agreement.verdicts[0]


def test_evidence_alone_is_told() -> None:
    said = diagnose(DiagnoseRequest(log=read_text(FORWARD + message())))
    assert "in the forward pass, in model > decoder_layer > mlp > down_proj (modeling_llama.py:155)" in said.verdict
    assert said.room is None and not said.choices and any("no model was named" in note for note in said.notes)


def test_a_failure_of_the_host_is_not_answered_with_a_plan() -> None:
    log = read_text("RuntimeError: DataLoader worker (pid 3) is killed by signal: Killed.\n")
    said = diagnose(DiagnoseRequest(log=log, spec=SPEC))
    assert said.verdict.startswith("A DataLoader worker was killed") and said.room is None and said.advice


def test_a_model_that_cannot_be_built_leaves_the_evidence(tmp_path: Path) -> None:
    spec = WorkloadSpec(model=str(tmp_path / "absent"))
    said = diagnose(DiagnoseRequest(log=read_text(FORWARD + message()), spec=spec))
    assert said.verdict and said.unprescribed


def test_fragmentation_and_other_processes_are_named() -> None:
    said = diagnose(
        DiagnoseRequest(log=read_text(FORWARD + message(allocated="12.00 GiB", cached="8.00 GiB", process="20.50 GiB")))
    )
    assert any("expandable_segments" in line for line in said.advice)
    assert any("other processes" in line for line in said.advice)


def test_what_the_log_says_of_the_run_is_compared_with_the_job() -> None:
    said = "world_size: 8\ntrainable params: 20,971,520 || all params: 8,051,232,768 || trainable%: 0.26\n"
    log = read_text(said + FORWARD + message())
    notes = diagnose(DiagnoseRequest(log=log, spec=SPEC)).notes
    assert sum("8 ranks" in n and "--shard 8" in n for n in notes) == 1
    assert sum("8,051,232,768" in n for n in notes) == sum("20,971,520" in n and "--lora" in n for n in notes) == 1
    assert any("20,971,520 that train" in n for n in diagnose(DiagnoseRequest(log=log)).notes)
    sharded = SPEC.model_copy(update={"shard": 8})
    assert not any("8 ranks" in n for n in diagnose(DiagnoseRequest(log=log, spec=sharded)).notes)
