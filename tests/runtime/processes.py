"""Processes that train together (gloo), for tests."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from autockpt.tracing.process import can_fork
from tests.policies.zoo import CASES

needs_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
)


def on_ranks(work: Callable[[int], list[str]], folder: Path, number: int = 2) -> list[str]:
    """Run ``work(rank)``, a function of a module, in so many processes at once; what it found wrong, by rank.

    ``folder`` is an empty directory for what they share. An exception in one of them is raised here.
    """
    in_processes(_one_process, (work, str(folder), number), number)
    files = ((rank, folder / f"{rank}.txt") for rank in range(number))
    return [f"rank {rank}: {line}" for rank, file in files for line in file.read_text().splitlines()]


def in_processes(work: Callable[..., None], arguments: tuple[Any, ...], number: int) -> None:
    """``work(rank, *arguments)`` in so many processes; forked where that is possible: imports are there then."""
    start_processes(work, arguments, nprocs=number, start_method="fork" if can_fork() else "spawn")


def two_steps(
    rank: int, parameters: Iterable[nn.Parameter], loss_of: Callable[[dict[str, Tensor]], Tensor]
) -> list[Tensor]:
    """This rank's share of the gradients of two optimizer steps, on a batch of its own."""
    torch.manual_seed(rank)
    parameters = list(parameters)
    optimizer, seen = torch.optim.SGD(parameters, lr=0.1), list[Tensor]()
    for _ in range(2):
        loss_of({k: v.roll(rank, 1) for k, v in CASES["llama"].batch().items()}).backward()
        for gradient in (p.grad for p in parameters if p.grad is not None):
            seen.append((gradient.to_local() if hasattr(gradient, "to_local") else gradient).clone())
        optimizer.step()
        optimizer.zero_grad()
    return seen


def meet(rank: int, folder: str, number: int = 2, **options: Any) -> None:
    """Begin as one of so many. They meet by way of a file: a free port may be taken by others before it is used."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=number, **options)


def _one_process(rank: int, work: Callable[[int], list[str]], folder: str, number: int) -> None:
    meet(rank, folder, number)
    wrong = work(rank)
    dist.barrier()
    Path(folder, f"{rank}.txt").write_text("\n".join(wrong))
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is done and written. Threads of gloo and of autograd that meet an interpreter which is shutting down sometimes
    # abort it ("terminate called without an active exception"), so it does not shut down.
    os._exit(0)
