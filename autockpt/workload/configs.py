"""From what the user calls a model (shape, file, directory, hub id) to transformers' configuration, fit to train.

A training step needs room for the sequence, all layers in every step, and padding: ``prepare``.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from autockpt.errors import UsageError, WorkloadError
from autockpt.schema.workload import WorkloadSpec
from autockpt.shipped import ShapeDefaults, list_models, load_model_shape
from autockpt.workload.failures import summary
from autockpt.workload.heads import TEXT, Task

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
MOST_LAYERS = 2000
_LAYERS = re.compile(r"(num_|n_)?((hidden|encoder|decoder)_)?layers?")
_FORMS = "a built-in shape, a hub id, a directory, a config.json, or package.module:function"


@dataclass(frozen=True)
class ConfigSource:
    """A configuration and where it came from. ``pretrained`` is where trained weights can be loaded, if anywhere."""

    config: Any
    where: str
    pretrained: str | None = None
    architecture: str | None = None
    defaults: ShapeDefaults | None = None


def find_config(spec: WorkloadSpec) -> ConfigSource:
    """The configuration that ``spec.model`` names; weights are not touched.

    Local files come first, then built-in shapes, then the hub's cache and the hub. Raises WorkloadError, also for a
    number of layers that no model has.
    """
    source = _find(spec)
    _check_layers(source.config.to_dict(), source.where)
    return source


def _check_layers(config: Any, where: str) -> None:
    """Refuse what would count as no layers, or be built and traced for hours; in nested configurations, too."""
    for key, value in config.items():
        if isinstance(value, dict):
            _check_layers(value, where)
        elif _LAYERS.fullmatch(str(key)) and isinstance(value, int) and not 0 <= value <= MOST_LAYERS:
            raise WorkloadError(
                f"the configuration of {where} says {key}: {value}",
                remedy=f"Models of 0 to {MOST_LAYERS:,} layers are planned for; correct the number.",
            )


def _find(spec: WorkloadSpec) -> ConfigSource:
    name = spec.model
    path = Path(name).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        return ConfigSource(_from_file(path / "config.json", spec), str(path), pretrained=str(path))
    if path.is_file():
        return ConfigSource(_from_file(path, spec), str(path))
    if name in list_models():
        return _from_shape(name)
    if path.is_dir():
        raise WorkloadError(f"the directory {name} holds no config.json", remedy=f"--model takes {_FORMS}.")
    if name.endswith(".json") or name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise WorkloadError(f"there is no file or directory {name!r}", remedy=f"--model takes {_FORMS}.")
    return _from_hub(name, spec)


def _from_shape(name: str) -> ConfigSource:
    from transformers import AutoConfig

    try:
        shape = load_model_shape(name)
        config = AutoConfig.for_model(shape.model_type, **shape.config)
    except UsageError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"this version of transformers cannot build the shape {name}: {summary(error)}",
            remedy="Use the version in constraints.txt.",
        ) from None
    return ConfigSource(config, name, shape.hub_id, shape.architecture, shape.defaults)


def _from_file(path: Path, spec: WorkloadSpec) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise WorkloadError(f"{path}{line} is not JSON: {summary(error)}", remedy="Correct the file.") from None
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}", remedy="Check its permissions.") from None
    model_type = data.get("model_type") if isinstance(data, dict) else None
    if not isinstance(model_type, str):
        raise WorkloadError(
            f"{path} is not a model's configuration: it has no model_type",
            remedy='Add "model_type": "llama", or whichever it is.',
        )
    if model_type not in CONFIG_MAPPING and "auto_map" not in data:
        near = get_close_matches(model_type, list(CONFIG_MAPPING.keys()), n=1)
        hint = f"Did you mean {near[0]}?" if near else "A newer transformers may know it."
        raise WorkloadError(f"{path}: transformers knows no model_type {model_type!r}", remedy=hint)
    _check_layers(data, str(path))  # before anything is made of it: some configurations hold an entry per layer
    try:
        return AutoConfig.from_pretrained(str(path), trust_remote_code=spec.trust_remote_code, local_files_only=True)
    except Exception as error:
        raise _explain(error, str(path)) from None


def _from_hub(name: str, spec: WorkloadSpec) -> ConfigSource:
    """From the hub's local cache if it is there, else over the network, if there is one."""
    from transformers import AutoConfig

    options = {"trust_remote_code": spec.trust_remote_code}
    try:
        return ConfigSource(AutoConfig.from_pretrained(name, local_files_only=True, **options), name, pretrained=name)
    except Exception as error:
        if not isinstance(error, OSError):
            raise _explain(error, name) from None
    if "/" not in name and (near := get_close_matches(name.lower(), list_models(), n=1, cutoff=0.75)):
        raise WorkloadError(f"there is no model {name!r}", remedy=f"Did you mean {near[0]}? {_shapes()}")
    if not hub_reachable():
        raise WorkloadError(
            f"{name!r} is neither a built-in shape nor in the local cache, and the hub cannot be reached",
            remedy=f"Check the name and the network, or give a directory or config.json. {_shapes()}",
        )
    try:
        return ConfigSource(AutoConfig.from_pretrained(name, **options), name, pretrained=name)
    except Exception as error:
        raise _explain(error, name) from None


def _explain(error: Exception, where: str) -> WorkloadError:
    text = str(error)
    if "trust_remote_code" in text:
        return WorkloadError(
            f"{where} needs code of its own, which has not been run",
            remedy="If you trust its authors, add `trust_remote_code: true` to the --job file.",
        )
    if "gated" in text.lower() or "401" in text:
        return WorkloadError(
            f"{where} is not open to everyone, or does not exist: {summary(error)}",
            remedy=f"Log in with `hf auth login`, or check the name. {_shapes()}",
        )
    if isinstance(error, OSError):
        return WorkloadError(f"{where} could not be had: {summary(error)}", remedy=f"Check the name. {_shapes()}")
    return WorkloadError(f"the configuration of {where} is not valid: {summary(error)}", remedy="Correct it.")


def _shapes() -> str:
    return f"Built-in shapes: {', '.join(list_models())}."


def hub_reachable() -> bool:
    """Whether asking the hub makes sense: its client would retry for most of a minute where there is no network."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    try:
        socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


@contextmanager
def quiet() -> Iterator[None]:
    """transformers' and bitsandbytes' advice about unusual configurations kept off the terminal; errors still come."""
    from transformers.utils import logging

    kernels = getLogger("bitsandbytes")  # says which faster kernels could be installed, PEFT's import of it included
    level = kernels.level
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kernels.setLevel(ERROR)
    try:
        yield
    finally:
        kernels.setLevel(level)
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


# These count positions from behind the padding token's id.
_OFFSET = ("roberta", "camembert", "data2vec-text", "longformer", "mpnet", "ibert", "xmod", "luke", "esm", "lilt")
# These look for padding tokens, or shift labels by one, in forward.
_NEED_PADDING: tuple[Task, ...] = ("seq2seq_lm", "speech_seq2seq", "sequence_classification")
_LAYER_DROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def prepare(source: ConfigSource, task: Task, length: int | None, trained: bool) -> tuple[str, ...]:
    """Adjust a configuration for sequences of ``length`` tokens (None: no text); what was changed, for people.

    Raises WorkloadError where the positions do not suffice and cannot be changed.
    """
    config = source.config
    if task in _NEED_PADDING and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # as T5 does
    return (*_keep_layers(config), *_fit_positions(source, task, length, trained))


def _keep_layers(config: Any) -> tuple[str, ...]:
    """LayerDrop off: a plan needs the same layers in every step."""
    dropped = [name for name in _LAYER_DROP if getattr(config, name, None)]
    for name in dropped:
        setattr(config, name, 0.0)
    return (f"{' and '.join(dropped)} set to 0: a plan needs the same layers in every step",) if dropped else ()


def _fit_positions(source: ConfigSource, task: Task, length: int | None, trained: bool) -> tuple[str, ...]:
    config = source.config.get_text_config()
    if length is None or task not in (*TEXT, "speech_seq2seq"):
        return ()
    name = "max_target_positions" if task == "speech_seq2seq" else "max_position_embeddings"
    limit = getattr(config, name, None)
    if not isinstance(limit, int) or limit <= 0:
        return ()
    offset = 0
    if any(part in str(getattr(config, "model_type", "")) for part in _OFFSET):
        offset = int(getattr(config, "pad_token_id", None) or 0) + 1
    needed, room = length + offset, limit - offset
    if needed <= limit:
        return ()
    if trained or task == "speech_seq2seq":
        raise WorkloadError(
            f"{source.where} has {room} positions, so sequences of {length} tokens do not fit",
            remedy=f"Use --seq-len {room} or less{', or random weights' if trained else ''}.",
        )
    setattr(config, name, needed)
    return (f"{name} raised from {limit} to {needed} for sequences of {length} tokens",)
