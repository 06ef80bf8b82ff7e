"""The long campaign runs only where it is asked for."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "campaign" in (config.option.markexpr or ""):
        return
    long = [item for item in items if item.get_closest_marker("campaign")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
