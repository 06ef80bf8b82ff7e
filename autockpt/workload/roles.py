"""Which children of a block are its attention and its MLP, by the names that model code gives them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from autockpt.schema.graph import UnitRole
from autockpt.workload.names import class_name, unwrap

_DEPTH = 3  # T5: block -> layer list -> member -> SelfAttention
_ATTENTION = re.compile(r"(attention|attn|mha|attentionblock|selfattn)\d*$")
_MLP = re.compile(
    r"(mlp|ffn|ffwd|feedforward|feed_forward|moe|moeblock|moe_block|sparsemoeblock|intermediate|densereludense"
    r"|denseactdense|densegatedactdense|dense_relu_dense|mlp_?block)\d*$|^ff\d*$"
)
_LEAVES_ALLOWED = (nn.Sequential, nn.MultiheadAttention)


def sub_units(block: nn.Module) -> Iterator[tuple[str, nn.Module, UnitRole]]:
    """(name relative to the block, module, role) of the attentions and MLPs inside a block, outermost ones only.

    An MLP in two modules, as BERT's ``intermediate`` and ``output``, gives both.
    """
    yield from _search(block, "", _DEPTH, {id(block)})


def _search(parent: nn.Module, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, nn.Module, UnitRole]]:
    children = {name: unwrap(child) for name, child in parent.named_children()}
    for name, child in children.items():
        relative = f"{path}.{name}" if path else name
        if id(child) in seen:
            continue
        seen.add(id(child))
        role = _role(name, child)
        if role is None and name == "output" and "intermediate" in children and _is_composite(child):
            role = "mlp"
        if role is not None:
            yield relative, child, role
        elif depth > 1 and _is_composite(child):
            yield from _search(child, relative, depth - 1, seen)


def _role(name: str, module: nn.Module) -> UnitRole | None:
    """The role of a child, by its attribute's name, else by its class's; none for norms, projections and the like.

    Members of lists (T5's layers within a block) are looked into instead: they hold a norm and a residual as well.
    """
    if not _is_composite(module) or name.isdigit() or name.startswith(("pre_", "post_")):
        return None
    for text in (name.lower(), class_name(module).lower()):
        if _ATTENTION.search(text):
            return "attention"
        if _MLP.search(text):
            return "mlp"
    return None


def _is_composite(module: nn.Module) -> bool:
    """Whether it is model code with parameters, and not one of PyTorch's own layers (norm, projection, dropout)."""
    if not any(True for _ in module.parameters()):
        return False
    if isinstance(module, _LEAVES_ALLOWED):
        return True
    if type(module).__module__.startswith("torch.nn.modules") and not isinstance(
        module, (nn.ModuleList, nn.ModuleDict)
    ):
        return False
    return any(True for _ in module.children()) or len(list(module.parameters(recurse=False))) > 2
