"""One rank's share of a model, by the engines that training uses: FSDP2, hybrid sharding, tensor parallelism.

What is sharded needs a process group of as many ranks, real or pretended.
"""

from __future__ import annotations

import re
from math import prod

from torch import distributed, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autockpt.errors import UsageError
from autockpt.workload.units import discover_units, modules_of

TENSOR_PARALLEL = "tp"


def ranks_of(how: int | str) -> int:
    """How many ranks a ``shard`` of a job file is over: the product of its numbers."""
    return prod(map(int, re.findall(r"\d+", str(how))))


def in_a_group() -> bool:
    """Whether this process is one of several, or believes so."""
    return distributed.is_available() and distributed.is_initialized()


def shard_model(model: nn.Module, how: int | str, units: str | None = None) -> bool:
    """Leave this rank's share of a model in its place, as a job file's ``shard`` says; see ``SHARDED``.

    FSDP2 takes each block, or module of ``units``, for itself, then the rest together. False for a model that its maker
    has sharded, which stays as it is. Raises UsageError for what cannot be sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    parameters = list(model.parameters())
    if any(isinstance(p, DTensor) for p in parameters):
        return False
    if any(is_traceable_wrapper_subclass(p) or not p.is_floating_point() for p in parameters):
        raise UsageError(
            f"`shard: {how}` cannot divide quantised weights",
            remedy="Leave one of the two out of the job: whole weights are sharded, or each GPU holds packed ones.",
        )
    sizes, _, kept = str(how).partition(" ")
    if sizes.startswith(TENSOR_PARALLEL):
        _tensor_parallel(model, int(sizes.removeprefix(TENSOR_PARALLEL)))
        return True
    shape = tuple(map(int, sizes.split("x")))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    blocks = [unit.name for unit in discover_units(model, units) if unit.role == "block"]
    for block in modules_of(model, blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=not kept)
    fully_shard(model, mesh=mesh, reshard_after_forward=False if kept else None)
    return True


def _tensor_parallel(model: nn.Module, ranks: int) -> None:
    """As transformers distributes a model, by the plan that comes with it."""
    if not getattr(model, "tp_plan", None) or not hasattr(type(model), "maybe_distribute_model"):
        raise UsageError(
            f"transformers has no plan for tensor parallelism of {type(model).__name__}",
            remedy="Shard the model in a function of your own (parallelize_module), or use `shard` without tp.",
        )
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    tied = model.get_output_embeddings() if model.config.tie_word_embeddings else None
    if tied is not None:  # apart, and together again as after loading
        tied.weight = nn.Parameter(tied.weight.detach())
    mesh = init_device_mesh("cpu", (1, 1, 1, ranks), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    type(model).maybe_distribute_model(model, DistributedConfig(tp_size=ranks), TransformersDeviceMesh(mesh, mesh))
    if tied is not None:
        model.tie_weights()
