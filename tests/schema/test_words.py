from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.schema import OFFLOAD, RECOMPUTE, SAVE, Choice, Measurement, words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00 ms"),
        (12e-6, "12.0 µs"),
        (0.9e-3, "900 µs"),
        (0.0123, "12.3 ms"),
        (0.412, "412 ms"),
        (0.9996, "1 s"),
        (1.234, "1.23 s"),
        (92.04, "92.0 s"),
        (102, "1 min 42 s"),
        (119.6, "2 min 00 s"),
        (3 * 3600 + 65, "3 h 01 min"),
        (-0.5, "-500 ms"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert words.seconds(value) == text


@given(st.floats(0, 1e6))
def test_seconds_are_short(value: float) -> None:
    assert len(words.seconds(value)) <= 12


def test_shares() -> None:
    assert words.share(0.0871, signed=True) == "+8.7 %"
    assert words.share(-0.02, signed=True) == "-2.0 %"
    assert words.share(0.0001, signed=True) == words.share(-0.0001, signed=True) == "0.0 %"


def test_noise_is_shown_where_it_is_known() -> None:
    assert words.step_time(Measurement(peak_bytes=1, step_seconds=0.412, noise=0.008)) == "412 ms ±0.8 %"
    assert words.step_time(Measurement(peak_bytes=1, step_seconds=0.412)) == "412 ms"
    assert words.step_time(Measurement(peak_bytes=1, step_seconds=0.412, noise=1.0)) == "412 ms ±?"


def test_counts() -> None:
    assert words.counted(1, "trial") == "1 trial" and words.counted(1234, "op") == "1,234 ops"
    assert words.counted(2, "micro-batch", "micro-batches") == "2 micro-batches"


def test_a_plan_in_one_line() -> None:
    plan: dict[str, Choice] = {"h.0": SAVE, "h.1": RECOMPUTE, "h.2": OFFLOAD, "h.3": SAVE, "h.3.mlp": RECOMPUTE}
    assert words.strip(plan) == ".ROr"
    long: dict[str, Choice] = {f"h.{i}": SAVE if i < 30 else RECOMPUTE for i in range(80)}
    assert words.strip(long) == ".×30 R×50"
    assert words.strip({}) == ""
    assert words.strip(plan, units=[*plan, "lm_head"]) == ".ROr.", "what no choice was made for saves"
    assert words.tally(plan) == "2 save, 2 recompute, 1 offload"


def test_settings_in_one_line() -> None:
    settings = {"dtype": "fp32", "batch_size": 4, "packed": False, "lora": None, "tied": True, "params": 1235814400}
    assert words.facts(settings) == "dtype fp32, batch size 4, tied, params 1,235,814,400"


def test_a_job_is_known_by_what_only_simulated_hardware_follows_too() -> None:
    settings = {"dtype": "bf16", "shard": 8, "ddp": "views", "master_weights": True, "keep_gradients": False}
    assert words.job(settings) == "dtype bf16, shard 8, ddp views, master weights"


def test_a_comparison_never_comes_without_its_interval() -> None:
    ours, none = (Measurement(peak_bytes=1, step_seconds=s, noise=n) for s, n in ((1.05, 0.003), (1.0, 0.004)))
    assert words.compared(ours, none, "saving everything") == "5.0 % slower than saving everything (±0.5 %)"
    assert words.compared(none, ours, "ours") == "4.8 % faster than ours (±0.5 %)"


def test_inside_the_noise_plans_are_about_as_fast() -> None:
    ours = Measurement(peak_bytes=1, step_seconds=0.975, noise=0.119)
    none = Measurement(peak_bytes=1, step_seconds=1.0, noise=0.01)
    assert words.compared(ours, none, "saving everything") == "about as fast as saving everything (±12 %)"
    once = Measurement(peak_bytes=1, step_seconds=0.5, noise=1.0)
    assert "about as fast" in words.compared(once, none, "saving everything")
