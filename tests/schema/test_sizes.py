from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.errors import UsageError
from autockpt.schema.sizes import format_binary, format_decimal, headroom_of, parse_budget, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("23.5GiB", 23 * 2**30 + 2**29),
        ("0.5KB", 500),
        ("1 MiB", 2**20),
        ("800MB", 800_000_000),
    ],
)
def test_sizes_mean_what_they_say(text: str, size: int) -> None:
    assert parse_size(text) == size


WRONG = "24||GB|-24GB|0GB|nanGB|infGB|1e3GB|24gb|24G|24\u2009GB|24  GB| 24GB|24GB\n|٢٤GB|24,5GB|24.GB|.5GB|1048577TiB"
WRONG += "|0.000000001KB|0%|0%act|101%|-5%|nan%|60%ACT|60 % act|%|Auto|24GBx|1_000MB"


@pytest.mark.parametrize("text", WRONG.split("|"))
def test_anything_else_is_refused_with_a_remedy(text: str) -> None:
    for parse in (parse_budget, parse_size):  # of which a size is neither a share nor auto
        with pytest.raises(UsageError) as caught:
            parse(text)
        assert ("auto" in caught.value.remedy) is (parse is parse_budget) and caught.value.exit_code == 2


@given(st.text(max_size=20))
def test_arbitrary_text_is_a_budget_or_a_usage_error(text: str) -> None:
    try:
        budget = parse_budget(text)
    except UsageError:
        return
    assert budget.resolved(10**9, 10**8, 10**10).bytes > 0


def test_shares_are_of_the_jobs_own_peaks() -> None:
    assert parse_budget("60%").resolved(1000, 200, 5000).bytes == 600
    assert parse_budget("60%act").resolved(1000, 200, 5000).bytes == 680
    assert parse_budget("100%act").resolved(1000, 200, 5000).bytes == 1000
    assert parse_budget("auto").resolved(1000, 200, 5000).bytes == 5000
    assert parse_budget("3KB").resolved(1000, 200, 5000).bytes == 3000


@pytest.mark.parametrize(
    ("size", "binary", "decimal"),
    [
        (23.5 * 2**30, "23.5 GiB", "25.2 GB"),
        (2**30, "1.00 GiB", "1.07 GB"),
        (1023 * 2**20, "1023 MiB", "1.07 GB"),
        (999_999_999, "954 MiB", "1.00 GB"),
        (99_700_000_000, "92.9 GiB", "99.7 GB"),
        (512, "512 B", "512 B"),
        (0, "0 B", "0 B"),
        (-300 * 2**20, "-300 MiB", "-315 MB"),
    ],
)
def test_sizes_are_printed_with_three_digits(size: float, binary: str, decimal: str) -> None:
    assert (format_binary(size), format_decimal(size)) == (binary, decimal)


@given(st.decimals(0, 99, places=3), st.integers(1, 10**13))
def test_a_headroom_and_what_is_left_are_the_budget(percent: Decimal, size: int) -> None:
    budget = parse_budget("auto").with_headroom(f"{percent}%")
    resolved = budget.resolved(0, 0, size, "cpu")
    assert resolved.bytes + resolved.headroom_bytes == size and 0 < resolved.bytes <= size
    exact = percent * size / 100
    assert resolved.bytes == 1 or exact <= resolved.headroom_bytes < exact + 1


@pytest.mark.slow
@given(st.one_of(st.text(max_size=12), st.from_regex(r"\A-?[0-9]{1,4}(\.[0-9])? ?(%|%act|MB|mb|GiB)?\Z")))
def test_arbitrary_text_is_a_headroom_or_a_usage_error(text: str) -> None:
    try:
        free = headroom_of(text, 10**12)
    except UsageError as error:
        assert error.remedy
        return
    assert free >= 0 and text[0].isdigit()
    assert text.endswith("%") or free == parse_size(text)


def test_a_simulation_leaves_headroom_unless_asked_otherwise() -> None:
    for text in ("24GB", "auto"):
        budget = parse_budget(text).with_headroom(None, simulated=True)
        found = budget.resolved(0, 0, 24 * 10**9, "cuda")
        assert (found.bytes, found.headroom, found.whole) == (228 * 10**8, "5%", 24 * 10**9)
        assert found.words == f"{text} less 5%"
    for unchanged, headroom in (("60%", None), ("60%act", None), ("24GB", "0%")):
        assert parse_budget(unchanged).with_headroom(headroom, simulated=True) == parse_budget(unchanged)
    assert parse_budget("24GB").with_headroom(None) == parse_budget("24GB")
    given = parse_budget("24GB").with_headroom("2%")
    assert given.with_headroom(None, simulated=True) == given
