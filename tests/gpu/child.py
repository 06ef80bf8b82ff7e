"""One item in a process of its own, which sends what it finds as it comes."""

import ctypes
import importlib
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from tests.gpu.items import Context
from tests.gpu.shapes import SHAPES

_SIGNAL_OF_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG


def main(descriptor: int) -> None:
    """Run the item that the script names; a traceback goes to the log."""
    go_with_parent()
    script = Connection(descriptor)
    item, shapes, out = script.recv()

    def keep(data: dict[str, Any]) -> None:
        script.send({"state": "partial", "data": data})

    began = time.monotonic()
    module, _, function = item.function.partition(":")
    context = Context(SHAPES[shapes], out, item, keep)
    found: dict[str, Any] = {"shapes": shapes, "date": time.strftime("%Y-%m-%d")}
    try:
        found["data"] = getattr(importlib.import_module(module), function)(context)
    except BaseException as error:
        traceback.print_exc()
        found |= {"state": _state(error), "message": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    else:
        found |= {"state": "done", "seconds": round(time.monotonic() - began, 1)}
        found["environment"] = _environment(context.device)
    script.send(found)


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
