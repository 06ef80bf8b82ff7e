"""Backends of which nobody knows yet whether a dispatch mode that looks on changes what they compute.

Inside of a mode autocast casts less: an op whose kernel calls others is cast or not by the backend's own list, and
where that is thin the matrix products inside run in another type. ``watching`` names the ops concerned on the CPU and
on CUDA. On any other device each unit is compared with itself, once.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import BaseTorchDispatchMode

from autockpt.checkpointing.arguments import tensors_of
from autockpt.checkpointing.autocast import without_remembered_casts
from autockpt.checkpointing.fingerprint import digest
from autockpt.devices.random_states import RandomStates
from autockpt.errors import ConflictError
from autockpt.policies.attachment import Attachment, call_inner
from autockpt.policies.base import device_of

KNOWN = ("cpu", "cuda", "meta")
WATCHING = ("remake",)


def refuse_changed(module: nn.Module, state: Attachment, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ConflictError where looking on changes a bit of what this unit's forward gives or saves for backward.

    Asked before each forward; on devices that are not ``KNOWN`` the unit runs twice more at the first one with these
    settings of autocast, as a copy that shares its parameters.
    """
    kinds = [value.device.type for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    kind = next((kind for kind in kinds if kind not in KNOWN), kinds[0] if kinds else device_of(module).type)
    if kind in KNOWN:
        return
    known: set[Any] = state.__dict__.get("_cache_compared") or set()
    state._cache_compared = known  # type: ignore[attr-defined]
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    settings = (kind, autocast and torch.get_autocast_dtype(kind), module.training)
    if settings in known:
        return
    # not put back where the user's forward fails: it then has drawn what it would have drawn
    random_states = RandomStates()
    plain = _bits(module, state, args, kwargs, watched=False)
    random_states.put_back()
    watched = _bits(module, state, args, kwargs, watched=True)
    random_states.put_back()
    if plain != watched:
        raise ConflictError(
            f"{state.unit} gives other bits on this {kind} device as soon as its ops are watched, which remake does",
            remedy=f"Use recompute, selective, offload or save on {state.unit}.",
        )
    known.add(settings)


def _bits(
    module: nn.Module, state: Attachment, args: tuple[Any, ...], kwargs: dict[str, Any], *, watched: bool
) -> list[str]:
    """Digests of what a copy of the unit saves for backward and returns, in order."""
    same = {id(parameter): parameter for parameter in module.parameters()}
    own = {id(tensor): tensor.clone() for tensor in tensors_of((args, kwargs)) if id(tensor) not in same}
    try:
        twin, args, kwargs = copy.deepcopy((module, args, kwargs), {**same, **own})
    except Exception as error:
        raise ConflictError(
            f"{state.unit} cannot be copied to see whether watching its ops changes anything on this device: {error}",
            remedy=f"Use recompute, offload or save on {state.unit}.",
        ) from error
    digests: list[str] = []

    def no_backward(_: Any) -> torch.Tensor:  # it would add to the gradients of the unit's own parameters
        raise ConflictError(
            f"{state.unit} runs backward in its forward, which cannot be tried to see whether watching its ops changes "
            "anything on this device",
            remedy=f"Use recompute, offload or save on {state.unit}.",
        )

    hooks = saved_tensors_hooks(lambda tensor: digests.append(digest(tensor)), no_backward)
    try:  # without casts: the unit's first call is to make them itself, as later ones do
        with hooks, without_remembered_casts(), BaseTorchDispatchMode() if watched else nullcontext():
            output = call_inner(twin, state, args, kwargs)
    except BaseException:  # the user's own, which the unit's forward would have ended with: as far as that would be
        with torch.no_grad():
            for buffer, as_left in zip(module.buffers(), twin.buffers(), strict=True):
                buffer.copy_(as_left)
        raise
    return [*digests, *map(digest, tensors_of(output))]
