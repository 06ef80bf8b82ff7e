"""Errors of autockpt as tests look at them: by class and code, and by what they name; never by their wording."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autockpt.errors import AutockptError


@contextmanager
def raises(kind: type[AutockptError], *named: str) -> Iterator[pytest.ExceptionInfo]:
    """The block raises an error of this class, and with its very code: not that of a narrower one.

    ``named``: what the error has to name, message or remedy: a module, an option, a file with its line.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert error.code == kind.code and error.exit_code == kind.exit_code
    for name in named:
        assert name in str(error), f"{name!r} is not named by: {error}"
