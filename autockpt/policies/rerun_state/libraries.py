"""Which classes are libraries', and whose objects are left alone when the state of a unit is looked at."""

from __future__ import annotations

import functools
import re
import sys
import types
from typing import Any

import torch
from torch import nn
from torch._library.custom_ops import CustomOpDef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_NAMES = """
    torch torchvision torchaudio transformers accelerate peft deepspeed diffusers datasets tokenizers safetensors numpy
    scipy pandas bitsandbytes triton liger_kernel xformers flash_attn apex lightning pytorch_lightning tqdm rich wandb
    tensorboard mlflow autockpt logging threading _thread multiprocessing concurrent asyncio socket selectors subprocess
    ctypes inspect re importlib pathlib tempfile pytest _pytest timm sentence_transformers einops einx sympy mpmath
    jinja2 markupsafe joblib PIL matplotlib requests urllib3 huggingface_hub filelock fsspec IPython ipykernel zmq
    tornado
"""
LIBRARIES = frozenset(re.findall(r"\w+", _NAMES))
_DERIVED_FROM = frozenset(
    {"torch", "transformers", "accelerate", "peft", "diffusers", "lightning", "pytorch_lightning"}
    | {"timm", "sentence_transformers"}
)
"""Libraries from whose classes people derive what they keep state in."""
_BY_THEMSELVES = re.compile(
    r"torch\.(utils\.data|optim|distributed|multiprocessing|autograd|_)|transformers\.(tokenization|train)"
)
"""Modules of these whose objects work by themselves, whoever derived their classes: data sets, optimizers, trainers."""
_OF_USERS = re.compile(r"multiprocessing\.sharedctypes$|scipy\.stats")
"""Modules of these whose objects are looked at: distributions and sequences have a generator of their own."""
_CONFIGURATIONS = frozenset({"PretrainedConfig", "PreTrainedConfig", "GenerationConfig"})
_BASES = (nn.Module, object, CustomOpDef, torch.quasirandom.SobolEngine, TorchFunctionMode, TorchDispatchMode)
"""Classes of libraries whose objects, and those of classes derived from them, are looked at."""


def is_library(cls: type) -> bool:
    """Whether a class is a library's, and none whose objects hold what is the user's."""
    return cls not in _BASES and not _OF_USERS.match(cls.__module__) and _top(cls.__module__) in LIBRARIES


@functools.cache
def in_library(module: Any) -> bool:
    """Whether a module of this name is a library's, or Python's own."""
    return _top(module) in LIBRARIES or _top(module) in sys.stdlib_module_names


def is_opaque(cls: type) -> bool:
    """Whether objects of a class are left alone: libraries' own but for configurations, and what is derived from such
    as work by themselves. Protocols have no state: torch.distributed.checkpoint's Stateful is one."""
    owners = [owner for owner in cls.__mro__ if is_library(owner) and "_is_protocol" not in owner.__dict__]
    if any(_top(owner.__module__) not in _DERIVED_FROM or _BY_THEMSELVES.match(owner.__module__) for owner in owners):
        return True
    return is_library(cls) and not any(owner.__name__ in _CONFIGURATIONS for owner in owners)


def registered() -> tuple[types.FunctionType, ...]:
    """Functions of somebody's own that transformers' models call by way of a table: attention, and its masks."""
    places = ("modeling_utils", "ALL_ATTENTION_FUNCTIONS"), ("masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS")
    tables = (getattr(sys.modules.get(f"transformers.{module}"), name, None) for module, name in places)
    homes = (fields for table in tables if table is not None for fields in (vars(type(table)), vars(table)))
    entries = (home.get(key, {}) for home in homes for key in ("_global_mapping", "_local_mapping"))
    found = (value for entry in entries if type(entry) is dict for value in entry.values())
    return tuple(f for f in found if type(f) is types.FunctionType and not in_library(f.__globals__.get("__name__")))


def _top(module: Any) -> str:
    return str(module).partition(".")[0]
