"""One item in a process of its own: ``python -m tests.gpu.child SLUG SHAPES OUT``."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.gpu.items import Context, items_of, read
from tests.gpu.shapes import SHAPES

_SIGNAL_OF_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG


def main() -> int:
    """Run the item and write what came of it; a traceback goes to the log."""
    go_with_parent()
    slug, name, out = sys.argv[1:4]
    shapes = SHAPES[name]
    item = next(item for item in items_of(shapes) if item.slug == slug)
    context = Context(shapes, Path(out), item)
    began = time.monotonic()
    more: dict[str, Any] = {"shapes": name, "date": time.strftime("%Y-%m-%d")}
    module, _, function = item.function.partition(":")
    try:
        data = getattr(importlib.import_module(module), function)(context)
    except BaseException as error:
        traceback.print_exc()
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        context.keep(read(context.out, item).get("data", {}), _state(error), message=words, **more)
        return 1
    more |= {"seconds": round(time.monotonic() - began, 1), "environment": _environment(shapes.device)}
    context.keep(data, "done", **more)
    return 0


def go_with_parent() -> None:
    """Where the script is killed, which it cannot tell its items, this one ends with all that it has started.

    It would keep the GPU from whoever comes next otherwise.
    """
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENTS_DEATH, signal.SIGTERM)


def _state(error: BaseException) -> str:
    from autockpt.devices import get_device
    from autockpt.errors import DeviceOutOfMemory

    full = isinstance(error, DeviceOutOfMemory) or get_device().out_of_memory(error)
    return "out of memory" if full else "failed"


def _environment(device: str) -> dict[str, Any]:
    import torch

    from autockpt.devices import get_device
    from autockpt.measuring import environment_of

    found = environment_of(get_device(device)).model_dump(mode="json")
    found["versions"]["CUDA"] = torch.version.cuda or "none"
    return found


if __name__ == "__main__":
    sys.exit(main())
