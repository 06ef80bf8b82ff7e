"""Functions that make one matrix product or attention and nothing else: known by all that they are given, with what
autograd saves of them, casts that autocast makes included."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autockpt.checkpointing.fingerprint import geometry_of
from autockpt.checkpointing.frame import diverged
from autockpt.policies.base import setting
from autockpt.policies.casts import autocast_now, may_be_remembered, remembered_cast
from autockpt.policies.conflicts import is_wrapped
from autockpt.policies.saved import address_of

Source = tuple[int, torch.dtype | None]
"""Which of the tensors that a function was given, or from -1 downwards of its own, and to what autocast cast it."""


class Ops(NamedTuple):
    """What one function did: what its wanted ops returned; of each cast what it was given, and returned."""

    wanted: list[Any]
    casts: list[tuple[torch.Tensor, torch.Tensor]]


PRODUCTS = frozenset(
    (
        *(torch.nn.functional.linear, torch.nn.functional.scaled_dot_product_attention, torch.addmm, torch.bmm),
        *(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__),
    )
)
NEW: Any = object()
Products = dict[Any, tuple[Source, ...] | None]


class Learnt:
    """By what a function is given: where what autograd saves comes from; None where more than one product is made."""

    products: ClassVar[Products] = {}


_MOST_PRODUCTS = 10_000
_CAN_ASK = (2, 3)  # autocast for what it remembers of such
_SCALARS = (type(None), bool, int, float)


def key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All that decides which ops a function of plain tensors runs; None where that is not known."""
    casts = autocast_now()
    forms: list[Any] = [func, torch.is_grad_enabled(), casts and casts[1:], *kwargs]  # remembered or not
    given = set[Any]()
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind is torch.Tensor or kind is nn.Parameter:
            dtype = value.dtype
            if value.layout is not torch.strided or dtype.is_complex or value.is_neg():
                return None
            forms += (*geometry_of(value), dtype, value.device, value.requires_grad)
            if casts is not None:
                if is_wrapped(value) or (extent := _extent(value)) in given:
                    return None  # it has no memory to tell it by, or a cast does not show of which of the two it is
                given.add(extent)
        elif kind in _SCALARS:
            forms += (kind, value)
        else:
            return None
    return tuple(forms)


def cast_again(tensor: torch.Tensor, dtype: torch.dtype, unit: str) -> torch.Tensor:
    """What autocast makes of what a product is given."""
    if not may_be_remembered(tensor) or tensor.dim() not in _CAN_ASK:
        return tensor.detach().to(dtype)
    cast = remembered_cast(tensor)
    if cast is None or cast.dtype is not dtype:
        raise diverged(unit, f"found another cast of a weight than {dtype} when it ran again")
    return cast


def _remembered_casts(saved: Sequence[Any], given: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of what a function was given that of which autocast may have remembered a cast, so that no op made it, and it."""
    # where nothing is saved, as without gradients, it remembers none, and is not to begin to
    tensors = [value for value in given if isinstance(value, torch.Tensor)] if saved and autocast_now() else []
    leaves = [tensor for tensor in tensors if may_be_remembered(tensor) and tensor.dim() in _CAN_ASK]
    return [(leaf, cast) for leaf in leaves if (cast := remembered_cast(leaf)) is not None]


def _casts_like(
    saved: Sequence[torch.Tensor], given: Sequence[Any], known: tuple[Source, ...]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What was cast and saved where a function like it did so: of what it was given, and the cast."""
    pairs = [(given[number], tensor) for tensor, (number, cast) in zip(saved, known) if cast is tensor.dtype]  # noqa: B905
    return [(source, cast) for source, cast in pairs if source.numel() == cast.numel()]


def sources_of(
    saved: Sequence[torch.Tensor], given: Sequence[Any], known: tuple[Source, ...], ops: Ops | None
) -> tuple[tuple[Source, ...], list[torch.Tensor]]:
    """The sources of what a function saved, and its own among them, without a graph. ``ops``: what it did, where they
    are not ``known``."""
    casts = _casts_like(saved, given, known) if ops is None else [*ops.casts, *_remembered_casts(saved, given)]
    places: dict[Any, Source] = {
        _extent(tensor): (number, None) for number, tensor in enumerate(given) if isinstance(tensor, torch.Tensor)
    }
    for before, after in casts:
        source = places.get(_extent(before))
        if source is not None and (not may_be_remembered(before) or before.dim() in _CAN_ASK):
            places.setdefault(_extent(after), (source[0], after.dtype))
    made: list[torch.Tensor] = []
    sources: list[Source] = []
    for tensor in saved:
        if (extent := _extent(tensor)) not in places:
            made.append(tensor.detach())
            places[extent] = -len(made), None
        sources.append(places[extent])
    return tuple(sources), made


def _extent(tensor: torch.Tensor) -> Any:
    """Which elements of which memory, whatever their order; of plain tensors, as ``key_of`` has seen to."""
    return tensor.untyped_storage()._cdata, tensor.dtype, tensor.storage_offset(), tensor.numel()


def learn(key: Any, wanted: list[Any], out: Any, sources: tuple[Source, ...], made: list[torch.Tensor]) -> None:
    """Remember whether a function makes one product and nothing else, and returns it."""
    if len(Learnt.products) >= _MOST_PRODUCTS:
        return
    own = [address_of(leaf) for leaf in tree_leaves(wanted) if isinstance(leaf, torch.Tensor)]
    product = len(wanted) == 1 and type(out) is torch.Tensor and all(address_of(t) in own for t in (out, *made))
    # without anything saved nothing tells when a gradient is taken through it
    Learnt.products[key] = sources if product and (sources or not out.requires_grad) else None


def products_known(known: Products) -> AbstractContextManager[None]:
    """Go by ``known`` in here, and add to it what is learnt: apart from what else runs in this process."""
    return setting(Learnt, "products", known)
