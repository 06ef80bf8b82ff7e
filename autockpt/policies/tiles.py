"""Tiles: inside of a unit that runs again in backward, MLPs and norms run on some tokens at a time.

The widest tensors of a layer are inside its MLP and its norms (in fp32), and of long sequences they are the peak of a
step, however much is recomputed. Rows do not depend on one another, so no more than a tile's need exist at once
(Bekman et al. 2025, arXiv:2506.13996). The input of such a module is kept as the unit keeps what it saves, and each
tile runs again in the module's own backward. Kernels may round otherwise for fewer rows, and gradients of weights are
sums over tiles, so gradients are equal up to rounding.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autockpt.checkpointing.arguments import Holder, save
from autockpt.checkpointing.fingerprint import tolerance_of
from autockpt.checkpointing.frame import identity
from autockpt.checkpointing.replay_context import AutocastState, accelerators_of, running_again
from autockpt.checkpointing.unit import holds_other_values
from autockpt.devices.random_states import TorchStates
from autockpt.errors import ConflictError
from autockpt.policies.base import Attachment, PlannedUnit, Session, call_inner, is_enabled
from autockpt.policies.chunked_head import goes_row_by_row
from autockpt.policies.lazy_logits import added, gradients_of, refuse_odd_backward

_FEW = 8  # rows that show whether rows depend on one another


class TileState(Attachment):
    """The attachment of a module that takes tokens in so many ``tiles``. ``proven``: that its rows do not depend on
    one another was seen, or is not looked at."""

    choice: ClassVar[str] = "`tiles`"
    has_check: ClassVar[bool] = True

    def __init__(self, unit: str, tiles: int, proven: bool) -> None:
        super().__init__(unit)
        self.tiles, self.proven = tiles, proven


def attach_tiles(unit: PlannedUnit, session: Session, tiles: int) -> None:
    """Place tiles on a unit's MLPs and norms. Raises ConflictError where it has none."""
    if not unit.row_wise:
        raise ConflictError(
            f"{unit.name} has no MLP or norm inside that could run in {tiles} tiles",
            remedy="Leave `tiles` out of its choice.",
        )
    for module in unit.row_wise.values():
        session.place(module, run_tiled, TileState(unit.name, tiles, session.sentinels.mode == "off"))


def run_tiled(module: nn.Module, state: TileState, /, *args: Any, **kwargs: Any) -> Any:
    """The module's forward, tile by tile. The plain forward without gradients, inside ``torch.compile``, for no more
    token but one, and where dropout or hooks act inside.

    Raises ConflictError where rows depend on one another, or random numbers are drawn.
    """
    if not is_enabled(state) or torch.compiler.is_compiling() or not goes_row_by_row(module, args, kwargs):
        return call_inner(module, state, args, kwargs)
    x: Tensor = args[0]
    trained = [p for p in module.parameters() if p.requires_grad]
    if x.shape[:-1].numel() == 1 or not (x.requires_grad or trained):
        return call_inner(module, state, args, kwargs)
    casts = AutocastState([x.device.type])
    if not state.proven:
        _refuse_mixing(module, state, casts, x.detach()[..., :_FEW, :])
        state.proven = True
    held = save(x)  # before the module runs: where it is the last, a recomputation of the unit ends here
    return _Tiles.apply(module, state, casts, held, x, *trained)


def _in_a_row(x: Tensor) -> Tensor:
    return x.reshape(*(1,) * (x.dim() - 2), -1, x.shape[-1])


def _of_forward(module: nn.Module, state: TileState, casts: AutocastState, part: Tensor) -> Tensor:
    """Inside autocast gradients are enabled: it would remember a copy of the weights that was made without them, and
    hand it to the next user. What is saved then is no concern of the unit's."""
    with torch.set_grad_enabled(casts.enabled), saved_tensors_hooks(identity, identity):
        return call_inner(module, state, (part,), {}).detach()


def _refuse_mixing(module: nn.Module, state: TileState, casts: AutocastState, few: Tensor) -> None:
    """Raise ConflictError where every second of a few rows gives something else than among the others."""
    used = accelerators_of([few])
    before = TorchStates(used)
    whole = _of_forward(module, state, casts, few)
    drawn = any(not torch.equal(a, b) for a, b in zip(before.tensors, TorchStates(used).tensors, strict=True))
    part = _of_forward(module, state, casts, _in_a_row(few)[..., 1::2, :])
    wanted = _in_a_row(whole)[..., 1::2, :]
    apart = (wanted.double() - part.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    if drawn or not apart <= tolerance_of(part.dtype):
        why = "draws random numbers" if drawn else "gives other rows for other neighbours"
        raise ConflictError(
            f"{type(module).__name__} in {state.unit} {why}, and its choice runs it in {state.tiles} tiles",
            remedy=f"Leave `tiles` out of the choice for {state.unit}.",
        )


class _Tiles(torch.autograd.Function):
    """Forward keeps nothing. Backward runs each tile again, and sums the weights' gradients in fp32 at least."""

    @staticmethod
    def forward(
        ctx: Any, module: nn.Module, state: TileState, casts: AutocastState, held: Holder, x: Tensor, *trained: Tensor
    ) -> Tensor:
        unit = state.current_unit(module)
        ctx.call, ctx.trained = (module, state, casts, held), trained
        ctx.unit, ctx.weights, ctx.training = unit, unit.parameters(), unit.training()
        rows = _in_a_row(x)
        parts = rows.chunk(state.tiles, -2)
        made = _of_forward(module, state, casts, parts[0])
        output = made.new_empty((*rows.shape[:-1], made.shape[-1]))
        first, *others = output.chunk(state.tiles, -2)
        first.copy_(made)
        for part, place in zip(parts[1:], others, strict=True):
            place.copy_(_of_forward(module, state, casts, part))
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        module, state, casts, held = ctx.call
        refuse_odd_backward(state, gradient)
        rows, now = _in_a_row(held.unpack().detach()), AutocastState([gradient.device.type])
        of_x, sums = torch.empty_like(rows), [None] * len(ctx.trained)
        parts, of_outputs, of_parts = (t.chunk(state.tiles, -2) for t in (rows, _in_a_row(gradient), of_x))
        exchanged = [entry for entry in ctx.unit.exchanged(ctx.weights) if holds_other_values(entry)]  # functional_call
        as_in_forward = ctx.unit.state.restored(exchanged, ctx.training, ctx.unit.training())
        with running_again(state.unit), casts.restored(), as_in_forward:
            for part, of_output, of_part in zip(parts, of_outputs, of_parts, strict=True):
                with torch.inference_mode(False), torch.enable_grad():
                    part = part.detach().requires_grad_()
                    output = call_inner(module, state, (part,), {})
                with now.restored():
                    of_rows, *found = gradients_of(output, [part, *ctx.trained], of_output)
                of_part.copy_(of_rows)
                sums = list(map(added, sums, found))
                del output, part, of_rows, found  # before the next tile's are made
        of_trained = (s if s is None else s.to(p.dtype) for s, p in zip(sums, ctx.trained, strict=True))
        return None, None, None, None, of_x.view(*gradient.shape[:-1], -1), *of_trained
