"""Find the units of a model, which choices are made for: repeated blocks, or modules by name; from the module tree
alone.

The attention and MLP inside a block are recognised by their names. Units are of one kind if everything that decides the
costs of their ops is equal. Names are without the prefixes of wrappers, so that a plan fits the model however wrapped.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autockpt.errors import PlanError, UsageError
from autockpt.schema.base import did_you_mean
from autockpt.schema.graph import Unit, UnitRole
from autockpt.schema.names import (
    WRAPPED_ANYWHERE,
    align,
    ancestors,
    fold,
    listing,
    outermost,
    parse_pattern,
    strip_prefixes,
)
from autockpt.schema.plan import Plan

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Lists of parallel members: one block's inside, never a row of blocks.
_PARALLEL = ("expert", "head", "branch")


def discover_units(model: nn.Module, named: str | None = None) -> tuple[Unit, ...]:
    """The model's blocks in order of the module tree, then their sub-units; empty where nothing repeats.

    ``named`` are patterns of module names, as in a plan, with commas between them (``encoder.layers.*,mid``): the
    modules that they stand for are the blocks then, whatever repeats. Raises UsageError for a pattern that stands for
    nothing that is called, and for modules of which one lies in another.

    Blocks are transformers' layers with a checkpointing slot, and otherwise the members of lists and sequences of
    modules; stages (ResNet, Swin) are descended to their blocks, a block's own inside and its experts are not. Names
    are free of wrapper prefixes. Units of equal ``kind`` have equal structure and stand in the same list of the model.
    """
    kinds: dict[object, int] = {}
    blocks: list[Unit] = []
    inner: list[Unit] = []
    for path, module in _blocks(model) if not named else _named(model, named):
        name = strip_prefixes(path)
        row = name.rpartition(".")[0]
        key = (row, structure_key(module))
        blocks.append(Unit(name=name, cls=class_name(module), kind=kinds.setdefault(key, len(kinds))))
        for relative, child, role in sub_units(module, {id(module)}):
            child_name = strip_prefixes(f"{name}.{relative}")
            child_key = (row, relative, structure_key(child))
            kind = kinds.setdefault(child_key, len(kinds))
            inner.append(Unit(name=child_name, cls=class_name(child), kind=kind, role=role, parent=name))
    return tuple(blocks + inner)


def discover_head(model: nn.Module) -> Unit | None:
    """The output head of a language model: the layer that turns features into logits over the vocabulary.

    Only plans that name it have to do with it; it is none of ``discover_units``. None where there is no such layer
    (seen through PEFT, DDP, compile, Lightning).
    """
    head = next((h for m in model.modules() if (h := _output_embeddings(m)) is not None), None)
    if head is None:
        return None
    path = next((path for path, module in model.named_modules() if module is head), None)
    return None if path is None else Unit(name=strip_prefixes(path), cls=class_name(head), kind=0, role="head")


def _output_embeddings(module: nn.Module) -> nn.Module | None:
    """What transformers' ``get_output_embeddings`` says."""
    ask = getattr(type(module), "get_output_embeddings", None)
    if ask is None or type(module).__module__.startswith("peft."):
        return None
    try:
        head = ask(module)
    except (AttributeError, NotImplementedError):
        return None
    linear = isinstance(head, nn.Module) and any(isinstance(inner, nn.Linear) for inner in head.modules())
    return unwrap(head) if linear else None


def module_of(model: nn.Module, unit_name: str) -> nn.Module:
    """The module behind a unit's name, on a model however wrapped (a LightningModule around the model included).

    Raises PlanError where the model has no such module, or several that could be meant.
    """
    return modules_of(model, [unit_name])[0]


def modules_of(model: nn.Module, unit_names: Sequence[str]) -> list[nn.Module]:
    """The modules behind units' names, in their order, found in one walk over the model; errors as ``module_of``."""
    exact: dict[str, nn.Module] = {}
    longer: dict[str, dict[str, nn.Module]] = {}
    wanted = set(unit_names)
    for name, module in named_units(model):
        if name in wanted:
            exact[name] = module
        ending = name
        while ending:  # every ending of the name that begins at a component
            _, _, ending = ending.partition(".")
            if ending in wanted:
                longer.setdefault(ending, {})[name] = module
    return [exact[name] if name in exact else _only(name, longer.get(name, {})) for name in unit_names]


def _only(unit_name: str, longer: Mapping[str, nn.Module]) -> nn.Module:
    """The one module whose name ends with the unit's."""
    if len(longer) == 1:
        return next(iter(longer.values()))
    if longer:
        found = ", ".join(list(longer)[:4])
        raise PlanError(f"{unit_name!r} could be any of {found}", remedy="Write the module's full name.")
    remedy = "Check that the plan was made for this model; `autockpt explain` prints the names of its units."
    if (inner := strip_prefixes(unit_name)) != unit_name:
        remedy = f"Names are without what wrappers put into them (PEFT, compile, DDP): write {inner!r}."
    raise PlanError(f"the model has no module named {unit_name!r}", remedy=remedy)


def fingerprint(units: Iterable[Unit]) -> str:
    """12 hexadecimal digits that identify a model's structure: its units' names and classes, in any order."""
    text = "\n".join(sorted(f"{unit.name} {unit.cls}" for unit in units))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def plan_units(model: nn.Module, named: object, patterns: Sequence[str]) -> tuple[Unit, ...]:
    """The units that a plan speaks of: those ``named`` in its settings, else blocks and what its ``patterns`` name.

    Raises PlanError where the model has no such modules.
    """
    if isinstance(named, str) and named:
        try:
            return discover_units(model, named)
        except UsageError as error:
            raise PlanError(
                f"this plan was made for another model: {error.message}",
                remedy="Search again for this model, or apply the plan to the model it was made for.",
            ) from None
    units = discover_units(model)
    known = [unit.name for unit in units]
    head = discover_head(model)
    unknown = [p for p in patterns if not _select(p, known) and not (head and _select(p, [head.name]))]
    every = [name for name, _ in named_units(model) if name]
    more = outermost([name for pattern in unknown for name in _select(pattern, every)])
    return (*units, *discover_units(model, ",".join(more))) if more else units


def units_setting(plan: Plan, units: Iterable[Unit], head: Unit | None) -> str | None:
    """``units`` of a workload in which a plan can be followed, where it names other modules than these units.

    Plans that a search made say which in their settings; those written by hand by the names themselves. None where
    these units will do.
    """
    if isinstance(named := plan.settings.get("units"), str):
        return named
    others = [p for p in plan.choices if p.strip("*.") and not (head and _select(p, [head.name]))]
    known = [unit.name for unit in units]
    if plan.model.classes or all(_select(pattern, known) for pattern in others):
        return None
    return ",".join(others)


def _select(pattern: str, names: Collection[str]) -> list[str]:
    """The names that a pattern stands for, however the model is wrapped."""
    pattern = strip_prefixes(pattern) or pattern
    view = align([pattern], names)
    return [view[name] for name in parse_pattern(pattern).select(view)]


def _named(model: nn.Module, patterns: str) -> list[tuple[str, nn.Module]]:
    """(name, module) of all that the patterns stand for, in the order of the module tree."""
    modules = {name: unwrap(module) for name, module in named_units(model) if name}
    found: set[str] = set()
    for pattern in filter(None, map(str.strip, patterns.split(","))):
        selected = _select(pattern, modules)
        called = [name for name in selected if type(modules[name]).forward is not nn.Module.forward]
        if selected and not called:
            kind = class_name(modules[selected[0]])
            raise UsageError(
                f"units {pattern!r}: {selected[0]} is a {kind}, which has no forward of its own",
                remedy=f"Name its members: {selected[0]}.*",
            )
        if not called:
            near = did_you_mean(pattern, [*modules, *fold(dict.fromkeys(modules, ""))])
            inside = listing(n for n in modules if "." not in n)
            raise UsageError(
                f"units {pattern!r}: the model has no such module",
                remedy=f"{near}Outermost modules: {inside}. * stands for one component, 0-11 for a range of indices.",
            )
        found.update(called)
    for name in found:
        if outer := next((a for a in ancestors(name) if a in found), None):
            raise UsageError(
                f"units {patterns!r}: {name} lies in {outer}, and both are named",
                remedy=f"Choose for {outer} as a whole, or leave it out and name its members.",
            )
    return [(name, module) for name, module in modules.items() if name in found]


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(qualified name, module) of every block, each module once."""
    slotted = any(_has_slot(module) for module in model.modules())
    found = list(_composite_blocks(model, "", slotted, in_list=False)) or list(_leaf_blocks(model))
    first = {id(module): path for path, module in reversed(found)}
    return [(path, module) for path, module in found if first[id(module)] == path]


def _composite_blocks(module: nn.Module, path: str, slotted: bool, in_list: bool) -> Iterator[tuple[str, nn.Module]]:
    """Blocks at or below ``module``. ``in_list``: it is a member of a list or sequence of modules."""
    module = unwrap(module)
    if _is_stage(module) or not (_has_slot(module) or (in_list and _is_plain_block(module, slotted))):
        members = isinstance(module, _CONTAINERS) and not _is_parallel(path)
        for name, child in module.named_children():
            if not _is_parallel(name) or _holds_slots(child):
                yield from _composite_blocks(child, f"{path}.{name}" if path else name, slotted, members)
    else:
        yield path, module


def _is_plain_block(module: nn.Module, slotted: bool) -> bool:
    """Whether a list's member is a block by itself rather than something to look further into.

    A leaf is none; in a model that has transformers' layers neither is a single projection with its activation.
    """
    if _holds_slots(module) or "Embedding" in class_name(module) or not any(True for _ in module.parameters()):
        return False
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    if type(module) is nn.Sequential and any(_height(child) for child in module.children()):
        return False
    return _height(module) >= (2 if slotted else 1)


def _is_stage(module: nn.Module) -> bool:
    """Whether a module is a row of blocks (a ResNet or Swin stage, an ALBERT group) rather than a block itself."""
    for name, child in module.named_children():
        child = unwrap(child)
        if not isinstance(child, _CONTAINERS) or _is_parallel(name):
            continue
        members = [unwrap(member) for member in child.children()]
        if any(_has_slot(member) for member in members):
            return True
        if class_name(module).endswith("Stage") and any(_height(member) for member in members):
            return True
        if _has_slot(module):
            continue  # T5's heterogeneous `layer` list, vision blocks with inner lists: the slot marks the block
        if members and len({type(member) for member in members}) == 1 and min(map(_height, members)) >= 2:
            return True
    return False


def _leaf_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """For plain stacks such as ``Sequential(Linear, ReLU, Linear)``: the members of every row that repeats itself."""
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Sequential, nn.ModuleList)) or _is_parallel(path):
            continue
        repeated = Counter(type(child) for child in module.children() if any(True for _ in child.parameters()))
        if max(repeated.values(), default=0) < 2:
            continue
        for name, child in module.named_children():
            if not isinstance(child, nn.Identity):
                yield f"{path}.{name}" if path else name, child


def _is_parallel(name: str) -> bool:
    last = name.rpartition(".")[2].lower()
    return any(word in last for word in _PARALLEL)


def _has_slot(module: nn.Module) -> bool:
    """Whether it derives from transformers' GradientCheckpointingLayer; answered without importing transformers."""
    layers = sys.modules.get("transformers.modeling_layers")
    return layers is not None and isinstance(module, layers.GradientCheckpointingLayer)


def _holds_slots(module: nn.Module) -> bool:
    return any(_has_slot(inner) for inner in module.modules())


def _height(module: nn.Module) -> int:
    """Levels of modules below this one: 0 for a leaf."""
    return 1 + max(map(_height, module.children()), default=-1)


_DEPTH = 3  # T5: block -> layer list -> member -> SelfAttention
_ATTENTION = re.compile(r"(attention|attn|mha|attentionblock|selfattn)\d*$")
_MLP = re.compile(
    r"(mlp|ffn|ffwd|feedforward|feed_forward|moe|moeblock|moe_block|sparsemoeblock|intermediate|densereludense"
    r"|denseactdense|densegatedactdense|dense_relu_dense|mlp_?block)\d*$|^ff\d*$"
)
_NORM = re.compile(r"(layer|rms)_?norm")
_LEAVES_ALLOWED = (nn.Sequential, nn.MultiheadAttention)


def sub_units(
    parent: nn.Module, seen: set[int], path: str = "", depth: int = _DEPTH
) -> Iterator[tuple[str, nn.Module, UnitRole]]:
    """(name relative to the block, module, role) of the attentions and MLPs inside a block, outermost ones only.

    Each module once: ``seen`` are the ids of those that were come by.

    An MLP in two modules, as BERT's ``intermediate`` and ``output``, gives both.
    """
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
            yield from sub_units(child, seen, relative, depth - 1)


def row_wise(block: nn.Module) -> dict[str, nn.Module]:
    """Modules inside a block that compute each token by itself, by path: MLPs and norms over features."""
    found = {path: module for path, module, role in sub_units(block, {id(block)}) if role == "mlp"}
    return found | {path: module for path, module in block.named_modules() if _NORM.search(class_name(module).lower())}


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
    lists = (nn.ModuleList, nn.ModuleDict)
    if type(module).__module__.startswith("torch.nn.modules") and not isinstance(module, lists):
        return False
    return any(True for _ in module.children()) or len(list(module.parameters(recurse=False))) > 2


# Attributes that tell siblings apart without changing what they do.
_POSITIONAL = re.compile(r"(^|_)(idx|index|id|number|num)$|^layer_n|^i_")
_IGNORED = {"training", "gradient_checkpointing", "forward"}


def structure_key(module: nn.Module) -> Hashable:
    """Equal for modules of equal structure.

    Classes, parameters and buffers (shapes, dtypes, requires_grad) and settings of the module and everything below
    it. A layer's own number is not part of it; what the model's config says about just that layer is.
    """
    return tuple(
        (name, class_name(inner), tuple(_tensors(inner)), tuple(_settings(inner)))
        for name, inner in module.named_modules()
    )


def _tensors(module: nn.Module) -> Iterator[Hashable]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:  # a lazy module's first forward is to give it a shape
            yield name, None if is_lazy(tensor) else tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _settings(module: nn.Module) -> Iterator[Hashable]:
    attributes = (
        (name, value)
        for name, value in sorted(vars(module).items())
        if not (name.startswith("_") or name in _IGNORED or _POSITIONAL.search(name))
    )
    for name, value in (*attributes, *_own_settings(module)):
        plain = _normalised(value)
        if plain is not ...:
            yield name, plain


def _own_settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Entries of the config's per-layer lists (``layer_types``, ...) that belong to this layer."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(index, int) or not isinstance(layers, int) or not 0 <= index < layers:
        return
    for name, value in vars(config).items():
        about_layers = "layer" in name or "block" in name
        if about_layers and isinstance(value, (list, tuple)) and len(value) == layers:
            yield name, value[index]


def _normalised(value: Any) -> Hashable:
    """The part of a setting that decides costs, or Ellipsis where it says nothing.

    Of a float only whether it is zero: drop path rates grow from layer to layer, epsilons and scales cost nothing.
    """
    if value is None or isinstance(value, (bool, int, torch.dtype)):
        return value
    if isinstance(value, float):
        return value != 0.0
    if isinstance(value, str):
        return re.sub(r"\d+", "#", value)
    if isinstance(value, (list, tuple)):
        items = tuple(_normalised(item) for item in value)
        return ... if any(item is ... for item in items) else items
    return ...


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside compile, FSDP and checkpoint wrappers around it; the module itself where there is none."""
    while True:
        inner = next((module._modules[name] for name in WRAPPED_ANYWHERE if name in module._modules), None)
        if inner is None:
            return module
        module = inner


def named_units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules as (stripped name, module); where a wrapper and its inside share a name the inside comes last."""
    for name, module in model.named_modules():
        yield strip_prefixes(name), module


def class_name(module: nn.Module) -> str:
    """The class's name, as it was before FSDP2 renamed it (``FSDPLlamaDecoderLayer``)."""
    cls = type(module)
    bare = cls.__name__.removeprefix("FSDP")
    if bare != cls.__name__ and any(base.__name__ == bare for base in cls.__mro__[1:]):
        return bare
    return cls.__name__
