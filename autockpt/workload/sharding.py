"""One rank's share of a model, by the engines that training uses: FSDP2, hybrid sharding, tensor parallelism.

What is sharded needs a process group of as many ranks, real or pretended.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autockpt.errors import UsageError
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload.losses import inner_model
from autockpt.workload.units import discover_units, modules_of

TENSOR_PARALLEL = "tp"


def in_a_group() -> bool:
    """Whether this process is one of several, or believes so."""
    return distributed.is_available() and distributed.is_initialized()


def shard_model(
    model: nn.Module, spec: WorkloadSpec, optimizer: Any = None, device: torch.device = torch.device("cpu")
) -> nn.Module:
    """This rank's share of a model, on ``device``, as ``spec.shard`` says (see ``SHARDED``); or in DDP (``spec.ddp``).

    FSDP2 takes each block, or module of ``spec.units``, for itself, then the rest together. What the maker of the model
    has sharded stays as it is. Raises UsageError for what cannot be sharded, and where an optimizer was made before.
    """
    if spec.ddp is not None:
        return nn.parallel.DistributedDataParallel(model.to(device), gradient_as_bucket_view=spec.ddp == "views")
    if spec.shard is None:
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    parameters = list(model.parameters())
    if any(isinstance(p, DTensor) for p in parameters):
        return model
    if optimizer is not None:
        raise UsageError(
            f"`shard: {spec.shard}` divides the weights, but {spec.model} made an optimizer for the whole ones",
            remedy="Shard the model in the function, before the optimizer is made; or leave that to `optimizer`.",
        )
    if any(is_traceable_wrapper_subclass(p) or not p.is_floating_point() for p in parameters):
        raise UsageError(
            f"`shard: {spec.shard}` cannot divide quantised weights",
            remedy="Leave one of the two out of the job: whole weights are sharded, or each GPU holds packed ones.",
        )
    sizes, _, kept = str(spec.shard).partition(" ")
    if sizes.startswith(TENSOR_PARALLEL):
        _tensor_parallel(model, spec.ranks, device)
        return model
    shape = tuple(map(int, sizes.split("x")))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    blocks = [unit.name for unit in discover_units(model, spec.units) if unit.role == "block"]
    for block in modules_of(model, blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=not kept)
    inner: Any = inner_model(model)
    # a stage that is not the last has no head: its step calls the model inside, which gathers what is not in a block
    headless = spec.stage is not None and len([*inner.base_model.parameters()]) == len(parameters)
    fully_shard(inner.base_model if headless else model, mesh=mesh, reshard_after_forward=False if kept else None)
    return model


def _tensor_parallel(model: Any, ranks: int, device: torch.device) -> None:
    """As transformers distributes a model, by the plan that comes with it."""
    if not hasattr(type(model), "maybe_distribute_model") or not model.tp_plan:
        raise UsageError(
            f"transformers has no plan for tensor parallelism of {type(model).__name__}",
            remedy="Shard the model in a function of your own (parallelize_module), or use `shard` without tp.",
        )
    divided = {name.rpartition(".")[2] for name, how in model.tp_plan.items() if how == "colwise"}
    for projection, kind in {"q_proj": "attention", "k_proj": "key_value"}.items():  # a rank views its part as heads
        heads = getattr(model.config.get_text_config(), f"num_{kind}_heads", None)
        if projection in divided and isinstance(heads, int) and heads % ranks:
            raise UsageError(
                f"`shard: {TENSOR_PARALLEL}{ranks}` does not divide the model's num_{kind}_heads: {heads}",
                remedy="Give a number of GPUs that divides them, or use `shard` without tp.",
            )
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    tied = model.get_output_embeddings() if model.config.tie_word_embeddings else None
    if tied is not None:  # apart, and together again as after loading
        tied.weight = nn.Parameter(tied.weight.detach())
    mesh = init_device_mesh(device.type, (1, 1, 1, ranks), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    type(model).maybe_distribute_model(model, DistributedConfig(tp_size=ranks), TransformersDeviceMesh(mesh, mesh))
    if tied is not None:
        model.tie_weights()
