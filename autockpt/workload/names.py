"""Modules and their names without what wrappers add, so that one plan fits a model however it is wrapped."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from autockpt.schema.names import WRAPPED_ANYWHERE, strip_prefixes


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
