"""The same model with fewer blocks, for whatever costs the same in every block."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autockpt.errors import AutockptError
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload.configs import find_config, quiet
from autockpt.workload.factory import is_factory

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
    if spec.pad_to is not None or spec.seq_len is not None:
        shape["seq_len"] = spec.seq_len
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
