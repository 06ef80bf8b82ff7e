"""Find the configuration of a model by its name (shape, file, directory, hub id), and prepare it for training.

A training step needs room for the sequence, all layers in every step, and padding (``prepare``), and a class with a
loss (``class_to_train``). What costs the same in every block is measured on a model of fewer blocks (``shallow_twin``).
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from autockpt.errors import AutockptError, WorkloadError
from autockpt.schema.base import did_you_mean
from autockpt.schema.workload import WorkloadSpec
from autockpt.shipped import ShapeDefaults, list_models, load_model_shape
from autockpt.workload.factory import is_factory
from autockpt.workload.failures import summary

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
MOST_LAYERS = 2000
_FORMS = "a built-in shape, a hub id, a directory, a config.json, or package.module:function"


Task = Literal[
    "causal_lm",
    "seq2seq_lm",
    "masked_lm",
    "sequence_classification",
    "token_classification",
    "image_classification",
]
TEXT: tuple[Task, ...] = ("causal_lm", "seq2seq_lm", "masked_lm", "sequence_classification", "token_classification")


@dataclass(frozen=True)
class ConfigSource:
    """A configuration and where it came from."""

    config: Any
    where: str
    architecture: str | None = None
    defaults: ShapeDefaults | None = None


def find_config(spec: WorkloadSpec) -> ConfigSource:
    """The configuration that ``spec.model`` names; weights are not touched.

    Local files come first, then built-in shapes, then the hub's cache and the hub. Raises WorkloadError, also for a
    number of layers that no model has.
    """
    name = spec.model
    path = Path(name).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        return ConfigSource(_from_file(path / "config.json", spec), str(path))
    if path.is_file():
        return ConfigSource(_from_file(path, spec), str(path))
    if name in list_models():
        return _from_shape(name)
    if path.is_dir():
        raise WorkloadError(f"the directory {name} holds no config.json", remedy=f"--model takes {_FORMS}.")
    if name.endswith(".json") or name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise WorkloadError(f"there is no file or directory {name!r}", remedy=f"--model takes {_FORMS}.")
    return _from_hub(name, spec)


def _check_layers(config: Mapping[str, Any], where: str) -> None:
    """Refuse what would count as no layers, or be built and traced for hours."""
    for name in sorted(_COUNTS & config.keys()):
        if isinstance(config[name], int) and not 0 <= config[name] <= MOST_LAYERS:
            raise WorkloadError(
                f"the configuration of {where} says {name}: {config[name]}",
                remedy=f"Models of 0 to {MOST_LAYERS:,} layers are planned for; correct the number.",
            )


def _from_shape(name: str) -> ConfigSource:
    from transformers import AutoConfig

    shape = load_model_shape(name)
    try:
        config = AutoConfig.for_model(shape.model_type, **shape.config)
    except Exception as error:
        raise WorkloadError(
            f"this version of transformers cannot build the shape {name}: {summary(error)}",
            remedy="Use the version in constraints.txt.",
        ) from None
    return ConfigSource(config, name, shape.architecture, shape.defaults)


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
        remedy = did_you_mean(model_type, CONFIG_MAPPING) or "A newer transformers may know it."
        raise WorkloadError(f"{path}: transformers knows no model_type {model_type!r}", remedy=remedy)
    _check_layers(data, str(path))  # before anything is made of it: some configurations hold an entry per layer
    try:
        return AutoConfig.from_pretrained(str(path), trust_remote_code=spec.trust_remote_code, local_files_only=True)
    except Exception as error:
        raise _explain(error, str(path)) from None


def _from_hub(name: str, spec: WorkloadSpec) -> ConfigSource:
    """From the hub's local cache if it is there, else over the network, if there is one."""
    from transformers import AutoConfig

    for local in (True, False):
        try:
            config = AutoConfig.from_pretrained(name, local_files_only=local, trust_remote_code=spec.trust_remote_code)
            return ConfigSource(config, name)
        except Exception as error:
            if not local or not isinstance(error, OSError):
                raise _explain(error, name) from None
        if "/" not in name and (near := get_close_matches(name.lower(), list_models(), n=1, cutoff=0.75)):
            raise WorkloadError(f"there is no model {name!r}", remedy=f"Did you mean {near[0]}? {_shapes()}")
        if not hub_reachable():
            break
    raise WorkloadError(
        f"{name!r} is neither a built-in shape nor in the local cache, and the hub cannot be reached",
        remedy=f"Check the name and the network, or give a directory or config.json. {_shapes()}",
    )


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
_NEED_PADDING: tuple[Task, ...] = ("seq2seq_lm", "sequence_classification")
_LAYER_DROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def prepare(source: ConfigSource, task: Task, length: int | None) -> tuple[str, ...]:
    """Adjust a configuration for sequences of ``length`` tokens (None: no text); what was changed, for people."""
    config = source.config
    if task in _NEED_PADDING and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # as T5 does
    dropped = [name for name in _LAYER_DROP if getattr(config, name, None)]
    for name in dropped:
        setattr(config, name, 0.0)
    same = (f"{' and '.join(dropped)} set to 0: a plan needs the same layers in every step",) if dropped else ()
    return (*same, *_fit_positions(source, length))


def _fit_positions(source: ConfigSource, length: int | None) -> tuple[str, ...]:
    config = source.config.get_text_config()
    name = "max_position_embeddings"
    limit = getattr(config, name, None)
    if length is None or not isinstance(limit, int) or limit <= 0:
        return ()
    offset = 0
    if any(part in str(getattr(config, "model_type", "")) for part in _OFFSET):
        offset = int(getattr(config, "pad_token_id", None) or 0) + 1
    needed = length + offset
    if needed <= limit:
        return ()
    setattr(config, name, needed)
    return (f"{name} raised from {limit} to {needed} for sequences of {length} tokens",)


@dataclass(frozen=True)
class ModelClass:
    """A model's class by name, its task, and the Auto class that makes it if ``remote``. ``note`` is for people."""

    name: str
    task: Task
    auto: str
    note: str | None = None
    remote: bool = False


# transformers' own tables, in the order in which they are asked for a configuration that names no class of its own.
_TABLES: tuple[tuple[str, Task, str], ...] = (
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "seq2seq_lm", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "masked_lm", "AutoModelForMaskedLM"),
    ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "causal_lm", "AutoModelForCausalLM"),
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "image_classification", "AutoModelForImageClassification"),
    ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "causal_lm", "AutoModelForImageTextToText"),
    (
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "sequence_classification",
        "AutoModelForSequenceClassification",
    ),
    ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", "token_classification", "AutoModelForTokenClassification"),
)
_TEXT_ONLY = "The batch is text only: images take more memory, so write a factory to plan for them."
_NOTES = {"AutoModelForImageTextToText": _TEXT_ONLY}
BY_HAND = "Write a function that returns (model, batch) and pass it as --model package.module:function."


def class_to_train(source: ConfigSource, own_code: bool = False) -> ModelClass:
    """The class to train: of the configuration's ``own_code``, if it has any and that may run; else the one it names.

    Where it names none that has a loss, the first that transformers' tables know for the model type. Raises
    WorkloadError where there is none.
    """
    config = source.config
    remote: dict[str, str] = (getattr(config, "auto_map", None) or {}) if own_code else {}
    for _, task, auto in _TABLES:
        if auto in remote:
            return ModelClass(remote[auto].rpartition(".")[2], task, auto, remote=True)
    if any(key.startswith("AutoModel") for key in remote):
        raise WorkloadError(f"the remote code of {source.where} offers no class with a loss", remedy=BY_HAND)
    named = source.architecture or next(iter(getattr(config, "architectures", None) or ()), None)
    tables = _tables()
    for table, task, auto in tables:
        if named is not None and any(named in classes for classes in table.values()):
            return ModelClass(named, task, auto, _NOTES.get(auto))
    encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    for table, task, auto in tables:
        if config.model_type not in table or (task == "seq2seq_lm") != encoder_decoder:
            continue
        cls = table[config.model_type][0]
        note = f"No loss of {named} is known here, so {cls} is trained instead." if named else None
        return ModelClass(cls, task, auto, note or _NOTES.get(auto))
    raise WorkloadError(
        f"{source.where} has no class with a loss that autockpt knows ({named or config.model_type})",
        remedy=BY_HAND,
    )


def _tables() -> list[tuple[dict[str, tuple[str, ...]], Task, str]]:
    from transformers.models.auto import modeling_auto

    def listed(name: str) -> dict[str, tuple[str, ...]]:
        entries = dict(getattr(modeling_auto, name, {}))
        return {kind: (cls,) if isinstance(cls, str) else tuple(cls) for kind, cls in entries.items()}

    return [(listed(name), task, auto) for name, task, auto in _TABLES]


# What transformers' configurations call the number of layers.
_COUNTS = {"num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"} | {
    *("n_layer", "n_layers", "depth"),
}
_PER_LAYER = ("layer_types", "mlp_layer_types")  # lists with an entry per layer


def shallow_twin(spec: WorkloadSpec, settings: Mapping[str, Any], blocks: int, folder: Path) -> WorkloadSpec | None:
    """The workload of ``spec`` with ``blocks`` blocks in each of its stacks (encoder, decoder, vision tower), or as
    many as it takes for one of every type; its configuration is written to ``folder``. None where unknown how.

    ``settings`` are the resolved ones of the whole workload, whose shape the twin keeps. Only models of transformers
    whose configuration counts their layers have twins; the caller checks that the blocks are alike.
    """
    if is_factory(spec.model) or spec.trust_remote_code:
        return None
    try:
        with quiet():
            source = find_config(spec)
    except AutockptError:
        return None
    config = source.config.to_dict()
    if not _shorten(config, blocks):
        return None
    if source.architecture is not None:
        config["architectures"] = [source.architecture]
    path = folder / "config.json"
    path.write_text(json.dumps(config, default=str), encoding="utf-8")
    shape = {name: settings.get(name) for name in ("batch_size", "seq_len", "dtype")}
    return spec.model_copy(update={**shape, "model": str(path)})


def _shorten(config: dict[str, Any], blocks: int) -> bool:
    """Count at most ``blocks`` layers, but one of each type, in each part of a configuration; whether any changed."""
    parts = [_shorten(part, blocks) for part in config.values() if isinstance(part, dict)]
    types = [config[name] for name in _PER_LAYER if isinstance(config.get(name), list)]
    blocks = max([blocks, *(1 + each.index(kind) for each in types for kind in set(each))])
    deep = [name for name in _COUNTS & config.keys() if isinstance(config[name], int) and config[name] > blocks]
    config |= dict.fromkeys(deep, blocks)
    config |= {name: config[name][:blocks] for name in _PER_LAYER if deep and isinstance(config.get(name), list)}
    return bool(deep) or any(parts)
