"""The shipped hardware descriptions: all there, each figure with its source, and packed into the wheel."""

import re
import tomllib
from pathlib import Path

import pytest

from autockpt.errors import UsageError
from autockpt.shipped import list_hardware, load_hardware
from autockpt.tuning.entry import of_host_with
from tests.errors import raises

ROOT = Path(__file__).parents[2]


# An address and what was read there, or what the figure rests on otherwise.
ORIGIN = re.compile(r"https://\S+: \S|(assumption|not confirmed|fitted|measured)\b|none on a CPU$")


@pytest.mark.parametrize("name", list_hardware())
def test_every_source_says_what_it_is(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name and hardware.description
    for figure, source in hardware.sources.items():
        assert ORIGIN.match(source), f"{figure}: {source}"
        if figure.startswith("efficiency."):  # no data sheet gives a share: it is fitted, measured, or assumed
            assert not source.startswith("https://"), figure
    stated = set(hardware.model_dump(exclude_none=True, exclude_defaults=True)) - {
        *("name", "description", "kind", "sources", "environment", "measured", "efficiency")
    }
    shares = {
        f"efficiency.{n}"
        for n, value in hardware.efficiency.model_dump(exclude_none=True).items()
        if value and n != "sustained"
    }
    shares |= {"efficiency.sustained"} if hardware.efficiency.sustained < 1 else set()
    assert set(hardware.sources) >= stated | shares


# GiB that PyTorch's messages or the vendor's tools were seen to say: the least of them, which no description exceeds
SEEN = {
    "rtx4090": 23.52,
    "rtx5090": 31.37,
    "a100-40": 39.39,
    "a100-80": 79.25,
    "l40s": 44.42,
    "h100": 79.11,
    "h200": 139.72,
    "b200": 178.35,
    "t4": 14.56,
    "a6000": 47.5,
    "rtx6000-ada": 44.43,
    "rtxpro6000": 94.97,
    "l4": 22.49,
    "a10g": 21.99,
    "v100-32": 31.74,
    "mi300x": 191.69,
    "m4-max": 107.52,
}


@pytest.mark.parametrize(("name", "gib"), SEEN.items())
def test_no_card_has_more_memory_than_it_was_seen_to_have(name: str, gib: float) -> None:
    assert 0.975 * gib < load_hardware(name).memory_bytes / 2**30 <= gib


def test_gpus_that_train_side_by_side_share_the_link_to_their_host() -> None:
    alone = load_hardware("gb200")
    for gpus in (2, 4):  # two of them behind each Grace
        shared = of_host_with(alone, gpus)
        assert shared.link_out * shared.efficiency.link == pytest.approx(175e9)
    assert of_host_with(alone, 1) == alone
    with raises(UsageError, "gh200", "host_link"):
        of_host_with(load_hardware("gh200"), 4)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text((ROOT / "search_spaces" / "hardware" / "h100.yaml").read_text())
    assert load_hardware(path).name == "mine"
    path.write_text("bandwidth: [")
    with raises(UsageError, "mine.yaml"):
        load_hardware(str(path))
    path.write_text("just words")
    with raises(UsageError):
        load_hardware(path)
    with raises(UsageError):
        load_hardware(tmp_path / "other.yaml")


def test_the_wheel_holds_the_descriptions() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "autockpt.search_spaces.hardware" in setup["packages"]
    patterns = setup["package-data"]["autockpt.search_spaces.hardware"]
    packed = {f.stem for pattern in patterns for f in (ROOT / "search_spaces" / "hardware").glob(pattern)}
    assert packed == set(list_hardware())
