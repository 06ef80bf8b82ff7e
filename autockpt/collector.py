"""Python's garbage collector: what it tells of objects that were put aside, and how it is made to wait."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# CPython 3.12, and no other version, puts objects that never die aside in each collection: 375 with all of PyTorch and
# transformers imported. Who freezes what lives on freezes hundreds of thousands.
_NEVER_DIE = 5_000


def frozen() -> bool:
    """Whether somebody in this process keeps objects frozen (``gc.freeze``)."""
    return gc.get_freeze_count() > _NEVER_DIE


@contextmanager
def waiting() -> Iterator[bool]:
    """No collection within the block. Gives whether there is any without it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield enabled
    finally:
        if enabled:
            gc.enable()
