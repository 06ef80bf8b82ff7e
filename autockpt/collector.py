"""What Python's garbage collector tells of objects that were put aside."""

from __future__ import annotations

import gc

# CPython 3.12, and no other version, puts objects that never die aside in each collection: 375 with all of PyTorch and
# transformers imported. Who freezes what lives on freezes hundreds of thousands.
_NEVER_DIE = 5_000


def frozen() -> bool:
    """Whether somebody in this process keeps objects frozen (``gc.freeze``)."""
    return gc.get_freeze_count() > _NEVER_DIE
