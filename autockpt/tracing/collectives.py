"""Ghost-run sharded steps (FSDP2, tensor parallelism, DDP) in one process, without communication.

A fork of a training process has none of gloo's threads and NCCL's streams, so that a collective which ran there would
wait forever; under PyTorch's fake process group there are no other ranks at all. What a collective writes is a ghost
either way. Three things besides the collectives themselves escape a dispatch mode: FSDP2 frees gathered weights by
resizing their storages, DDP's reducer starts collectives in C++, and the rules by which DTensor's ops are sharded run
ops of their own on fake tensors.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import _disable_current_modes

from autockpt.errors import UsageError
from autockpt.interpreter import patched
from autockpt.tracing.kernels.operators import COPY_IN, WAITS, Operator
from autockpt.tracing.storages import StorageLog
from autockpt.workload.sharding import in_a_group


def pretend_ranks(count: int) -> None:
    """Let this process believe itself the first of so many. Raises UsageError where it is one of several in truth."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # private: there is no other way to PyTorch's own

    if in_a_group():
        if distributed.get_backend() != "fake":
            raise UsageError(
                "this is one of several processes, and cannot believe itself one of others",
                remedy="Plan for described hardware in a process of its own, without torchrun.",
            )
        distributed.destroy_process_group()
    importlib.import_module("torch.distributed.fsdp")  # and DTensor, for ``sharded_as_ghosts`` to find
    distributed.init_process_group("fake", rank=0, world_size=count, store=FakeStore())


def answer(operator: Operator, args: tuple[Any, ...]) -> Any:
    """What an op ``of_ranks`` returns without a word to others: what it is given; NotImplemented for other tensors."""
    if operator.name == COPY_IN:  # this rank's part of a buffer, and the buffer
        _, output, _, numel, rank = args
        return output.narrow(0, numel * rank, numel), output
    if operator.namespace == "c10d":  # the tensors that it wrote to, and a handle whose work is over
        from torch._C._distributed_c10d import FakeWork  # private: the only handle that no process group has to make

        work = FakeWork().boxed()  # type: ignore[attr-defined]
        return work if operator.returns == 1 else (args[0], work)
    return args[0] if operator.base in WAITS or operator.base.endswith("_") else NotImplemented


@contextmanager
def sharded_as_ghosts(log: StorageLog) -> Iterator[None]:
    """Record what FSDP2 frees and gathers again, and keep DTensor's own bookkeeping out of the recording.

    Only what is loaded already is looked at: a step that uses neither costs nothing.
    """
    with ExitStack() as stack:
        # private modules: the two functions are the one place through which all of FSDP2's frees and gathers pass
        for name in ("_fsdp_param", "_fsdp_param_group"):
            module = sys.modules.get(f"torch.distributed.fsdp._fully_shard.{name}")
            for function, noted in (("free_storage", log.free), ("alloc_storage", log.refill)):
                if hasattr(module, function):
                    stack.enter_context(patched(module, function, _resized(noted, getattr(module, function))))
        if (ddp := sys.modules.get("torch.nn.parallel.distributed")) is not None:
            # its reducer starts collectives of its own, unless no forward of DDP's has announced a backward
            stack.enter_context(patched(ddp.DistributedDataParallel, "forward", _forward_inside))
        if (rules := sys.modules.get("torch.distributed.tensor._sharding_prop")) is not None:
            owner, name = rules.ShardingPropagator, "_propagate_tensor_meta_non_cached"
            stack.enter_context(patched(owner, name, _disable_current_modes()(getattr(owner, name))))
        yield


def _resized(note: Callable[[torch.UntypedStorage], bool], plain: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A ghost's storage keeps its size, which takes no memory; that it was freed or filled is noted."""

    def resize(tensor: Tensor) -> None:
        if not note(tensor.untyped_storage()):
            plain(tensor)

    return resize


def _forward_inside(ddp: Any, *args: Any, **kwargs: Any) -> Any:
    return ddp.module(*args, **kwargs)
