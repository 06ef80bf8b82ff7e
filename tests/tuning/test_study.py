from __future__ import annotations

import pytest

from autockpt.errors import RunDirectoryError
from autockpt.schema import load_space
from autockpt.tuning.study import Study


@pytest.mark.parametrize("storage", ["nonsense", "nosuchdriver://someone:secret@nowhere/db"])
def test_a_storage_that_cannot_be_opened_is_named_without_its_password(storage: str) -> None:
    with pytest.raises(RunDirectoryError, match="cannot be opened") as caught:
        Study(load_space("knobs"), {"a": [], "b": []}, name="search", storage=storage, seed=0)
    assert "secret" not in str(caught.value) and "sqlite:///" in caught.value.remedy
    assert caught.value.exit_code == 2
