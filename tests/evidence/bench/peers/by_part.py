"""Parts of a layer by name, as Megatron-LM's ``--recompute-modules`` for latent attention and mixtures of experts.

``moe`` and ``core_attn`` are recomputed as ``torch.utils.checkpoint`` does it. Of ``layernorm``, ``mla_up_proj`` and
``moe_act`` the outputs are dropped as well, as Megatron's ``CheckpointWithoutOutput`` does: saved tensors that look
into them are recomputed with the part. The parts are found in transformers' layers of DeepSeek V3.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autockpt.workload.units import module_of, unwrap
from tests.evidence.bench.peers.base import Context, Detach, Peer, Setting, replace_forwards

PARTS = ("core_attn", "mla_up_proj", "layernorm", "moe_act", "moe")
# singles, and what people combine; `moe` runs `moe_act` again anyway, so they are never named together
SETS: tuple[tuple[str, ...], ...] = (
    *((part,) for part in PARTS),
    ("layernorm", "moe_act"),
    ("mla_up_proj", "layernorm"),
    ("mla_up_proj", "moe_act"),
    ("layernorm", "moe"),
    ("mla_up_proj", "moe"),
    ("core_attn", "moe_act"),
    ("mla_up_proj", "layernorm", "moe_act"),
    ("core_attn", "mla_up_proj", "layernorm", "moe_act"),
    ("core_attn", "mla_up_proj", "layernorm", "moe"),
)


class NamedParts(Peer):
    """The same parts of every layer are recomputed."""

    name = "parts"

    def settings(self, context: Context) -> Iterable[Setting]:
        if any(hasattr(module, "kv_b_proj") for module in context.workload.model.modules()):
            for parts in SETS:
                yield Setting("+".join(parts), {"parts": list(parts)})

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        with ExitStack() as stack:
            for name in units:
                _attach(stack, unwrap(module_of(model, name)), set(setting["parts"]))
            stack.callback(replace_forwards(model, {}))
            return stack.pop_all().close


def _attach(stack: ExitStack, layer: Any, parts: set[str]) -> None:
    """Replace the forwards of a layer's parts, and its own, under which tensors that look into dropped ones are found.

    A dense layer has no experts, and so neither ``moe`` nor ``moe_act``.
    """
    outputs, attention, experts = DroppedOutputs(), layer.self_attn, getattr(layer.mlp, "experts", None)
    dropping, keeping = partial(outputs.run, drop=True), partial(outputs.run, drop=False)
    replaced: list[tuple[nn.Module, str, Callable[..., Any]]] = []
    if "layernorm" in parts:
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        replaced += [(norm, "forward", partial(dropping, norm.forward)) for norm in norms]
    if {"mla_up_proj", "core_attn"} & parts:
        up = dropping if "mla_up_proj" in parts else _as_it_is
        core = keeping if "core_attn" in parts else _as_it_is
        replaced.append((attention, "forward", partial(_attention, attention, up, core)))
    if experts is not None and "moe_act" in parts:
        replaced.append((experts, "_apply_gate", partial(dropping, experts._apply_gate)))
    if experts is not None and "moe" in parts:
        replaced.append((layer.mlp, "forward", partial(keeping, layer.mlp.forward)))
    replaced.append((layer, "forward", partial(outputs.around, layer.forward)))
    for module, name, function in replaced:
        stack.enter_context(patch.object(module, name, function))


def _as_it_is(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _attention(
    attention: Any, up: Callable[..., Any], core: Callable[..., Any], hidden_states: torch.Tensor, **named: Any
) -> tuple[torch.Tensor, None]:
    """transformers' forward of latent attention, cut where Megatron cuts it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    cos, sin = named.pop("position_embeddings")
    mask, _ = named.pop("attention_mask"), named.pop("past_key_values", None)
    query_latent, key_latent = attention.q_a_proj(hidden_states), attention.kv_a_proj_with_mqa(hidden_states)
    query, key, value = up(partial(_up_projections, attention), query_latent, key_latent, cos, sin)
    function = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]

    def product(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return function(attention, query, key, value, mask, dropout=0.0, scaling=attention.scaling, **named)[0]

    found = core(product, query, key, value)
    return attention.o_proj(found.reshape(*hidden_states.shape[:-1], -1).contiguous()), None


def _up_projections(
    attention: Any, query_latent: torch.Tensor, key_latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of all heads from their latent vectors."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    batch, length = query_latent.shape[:2]
    query = attention.q_b_proj(attention.q_a_layernorm(query_latent))
    query = query.view(batch, length, -1, attention.qk_head_dim).transpose(1, 2)
    plain, turned = torch.split(query, [attention.qk_nope_head_dim, attention.qk_rope_head_dim], dim=-1)
    latent, key_turned = torch.split(key_latent, [attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
    latent = attention.kv_a_layernorm(latent).view(batch, 1, length, -1)
    key_turned = key_turned.view(batch, 1, length, -1)
    turned, key_turned = apply_rotary_pos_emb_interleave(turned, key_turned, cos, sin)
    return torch.cat((plain, turned), dim=-1), *attention.expand_kv(latent, key_turned)


class DroppedOutputs:
    """Parts of one layer that are recomputed. ``_known``: dropped outputs by the address of their memory."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, _Part, int]] = {}

    def around(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The layer's forward. Of dropped outputs that it saves it saves the part and the geometry."""
        with saved_tensors_hooks(self.pack, _unpack):
            output = inner(*args, **kwargs)
        self._known.clear()
        return output

    def run(self, function: Callable[..., Any], *args: torch.Tensor, drop: bool) -> Any:
        """``function(*args)``, of which nothing is saved but the inputs; with ``drop`` its outputs are not either."""
        part = _Part(function, [(self.pack(arg), arg.requires_grad) for arg in args])
        with saved_tensors_hooks(part.pack, part.unpack):
            found = function(*args)
        for number, output in enumerate(found if isinstance(found, tuple) else (found,)):
            if drop:
                storage = output.untyped_storage()
                self._known[storage._cdata] = StorageWeakRef(storage), part, number
        return found

    def pack(self, tensor: torch.Tensor) -> Any:
        known = self._known.get(tensor.untyped_storage()._cdata)
        if known is None or known[0].expired():
            return tensor.detach()
        part, number = known[1:]
        part.uses[number] = part.uses.get(number, 0) + 1
        return part, number, tensor.size(), tensor.stride(), tensor.storage_offset()


def _unpack(held: Any) -> torch.Tensor:
    if isinstance(held, torch.Tensor):
        return held
    part, number, *geometry = held
    return part.output(number).as_strided(*geometry)


class _Part:
    """One call of a part. ``uses``: how often each of its dropped outputs is still asked for."""

    def __init__(self, function: Callable[..., Any], inputs: list[tuple[Any, bool]]) -> None:
        self.function, self.inputs = function, inputs
        self.uses: dict[int, int] = {}
        self.saved = 0
        self.values: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, torch.Tensor] = {}

    def pack(self, tensor: torch.Tensor) -> int:
        self.saved += 1
        return self.saved - 1

    def unpack(self, number: int) -> torch.Tensor:
        if number not in self.values:
            self._run_again()
        return self.values.pop(number)

    def output(self, number: int) -> torch.Tensor:
        if number not in self.outputs:
            self._run_again()
        self.uses[number] -= 1
        return self.outputs[number] if self.uses[number] else self.outputs.pop(number)

    def _run_again(self) -> None:
        inputs = [_unpack(held).detach().requires_grad_(trains) for held, trains in self.inputs]
        values: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> None:
            values.append(tensor.detach())

        with torch.enable_grad(), saved_tensors_hooks(keep, _unpack):
            found = self.function(*inputs)
        self.values = dict(enumerate(values))
        outputs = found if isinstance(found, tuple) else (found,)
        self.outputs = {n: output.detach() for n, output in enumerate(outputs) if n in self.uses}
