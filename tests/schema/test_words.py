import pytest

from autockpt.schema import Measurement, words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00 ms"),
        (12e-6, "12.0 µs"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (1.234, "1.23 s"),
        (102, "1 min 42 s"),
        (119.6, "2 min 00 s"),
        (3 * 3600 + 65, "3 h 01 min"),
        (-0.5, "-500 ms"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert words.seconds(value) == text


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
