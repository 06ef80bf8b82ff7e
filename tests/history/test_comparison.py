from __future__ import annotations

from autockpt.history.comparison import differences


def test_what_was_asked_differently_is_named_with_what_it_was_in_either() -> None:
    first = {"budget": "24GB", "workload": {"model": "m", "seq_len": 256}, "seed": 0}
    second = {"budget": "24GB", "workload": {"model": "m", "seq_len": 512}, "again": True, "seed": 0}
    assert list(differences(first, second)) == [("again", "—", "True"), ("workload.seq_len", "256", "512")]
    assert list(differences(first, first)) == []


def test_a_device_is_its_name_and_the_same_device_what_differs() -> None:
    card, other = ({"name": name, "bandwidth": 1e12, "threads": None} for name in ("rtx4090", "h100"))
    assert list(differences({"hardware": card}, {"hardware": None})) == [("hardware", "rtx4090", "—")]
    assert list(differences({"hardware": card}, {"hardware": other})) == [("hardware", "rtx4090", "h100")]
    slower = {**card, "bandwidth": 1e11}
    said = list(differences({"hardware": card}, {"hardware": slower}))
    assert said == [("hardware.bandwidth", str(1e12), str(1e11))]
