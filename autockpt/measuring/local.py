"""The measurer of a live step in the user's process, where no second copy of the model fits. It restores everything."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from autockpt.devices import get_device
from autockpt.errors import MeasurementError, UsageError
from autockpt.interpreter import signals_deferred
from autockpt.measuring.base import Measurer
from autockpt.measuring.compiler import Compiler
from autockpt.measuring.environment import environment_of
from autockpt.measuring.runner import StepRunner
from autockpt.measuring.snapshot import Snapshot
from autockpt.schema.plan import CompileMode
from autockpt.workload import Step


class LocalMeasurer(Measurer):
    """Measures a live workload and, on ``close``, restores all that its steps changed, bit-equal and in place.

    To be used as a context manager, so that errors and Ctrl-C restore as well: a Ctrl-C while restoring waits until
    that is done. Until then gradients are off the model. On the CPU the copy doubles what weights and optimizer take on
    the host; it is not part of the measured peak. See ``Snapshot`` for what is restored and for its errors. Raises
    UsageError where more than one process trains together, which would wait for one another for ever, unless
    ``others_wait``: the step takes no part in collective operations, and the other processes wait until it is over.
    """

    def __init__(
        self,
        workload: Step,
        *,
        host_budget: int | None = None,
        compile: CompileMode | None = None,
        others_wait: bool = False,
    ) -> None:
        if not others_wait:
            refuse_many_processes()
        self._device = get_device(str(workload.device))
        self.environment = environment_of(self._device)
        compiler = Compiler(compile, self._device.kind) if compile else None
        self._runner = StepRunner(workload, self._device, host_budget=host_budget, compiler=compiler)
        self._snapshot: Snapshot | None = None
        try:
            with signals_deferred([signal.SIGINT]):
                self._snapshot = Snapshot(workload)
                self._device.release()
        except BaseException:  # also a deferred Ctrl-C: the caller has nothing to close yet
            self.close()
            raise

    def with_others(self, barrier: Callable[[], object], recordings: int) -> None:
        """Begin every cycle at a ``barrier`` of all ranks; on the CPU a peak is the least of several ``recordings``."""
        self._runner.barrier = barrier
        self._runner.recordings = recordings if self._device.kind == "cpu" else 1

    def close(self) -> None:
        """Restore the user's state. The second call does nothing."""
        with signals_deferred([signal.SIGINT]):
            snapshot, self._snapshot = self._snapshot, None
            if snapshot is not None:
                self._device.release()
                snapshot.restore()
            self._runner.close()
            self._device.release()

    def __del__(self) -> None:
        if getattr(self, "_snapshot", None) is not None:
            self.close()

    def _ask(self, verb: str, **arguments: Any) -> Any:
        """Run a request with the device as the current one, as seeds and events need it."""
        if self._snapshot is None:
            raise MeasurementError("this measurer is closed", remedy="Make a new one.")
        self._runner.beat = self.beat
        device = self._device.torch_device
        with torch.accelerator.device_index(device.index) if device.type != "cpu" else nullcontext():
            return getattr(self._runner, verb)(**arguments)


def ranks_here() -> int:
    """The size of the process group that this process has joined; 1 without one."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


def refuse_many_processes() -> None:
    """Raises UsageError in one of several processes that train together (torchrun, torch.distributed)."""
    world_size = os.environ.get("WORLD_SIZE", "")
    size = max(int(world_size) if world_size.isdecimal() else 1, ranks_here())
    if size > 1:
        raise UsageError(
            f"this is one of {size} training processes, and this measures in a single one",
            remedy="Search, verify or calibrate once, without torchrun, and call autockpt.apply(model, 'plan.yaml') in "
            "every process; or search a live step that is sharded or in DDP on all ranks. Where this process trains by "
            "itself, unset WORLD_SIZE.",
        )
