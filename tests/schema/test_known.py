from __future__ import annotations

from autockpt.schema.known import ALL, EVERY_2, NOT_IN_THE_NAME, NUMBERED, legend_of_names


def test_names_that_do_not_say_it_are_explained_once() -> None:
    said = legend_of_names([ALL, EVERY_2, "knobs #0", "knobs #3", "measured plan"])
    assert said == [f"{EVERY_2}: {NOT_IN_THE_NAME[EVERY_2]}", f"knobs #n: {NUMBERED['knobs']}"]
