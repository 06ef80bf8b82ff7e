"""What a training step needs of a configuration: room for the sequence, all layers in every step, padding."""

from __future__ import annotations

from typing import Any

from autockpt.errors import WorkloadError
from autockpt.workload.configs import Source
from autockpt.workload.heads import TEXT, Task

# These count positions from behind the padding token's id.
_OFFSET = ("roberta", "camembert", "data2vec-text", "longformer", "mpnet", "ibert", "xmod", "luke", "esm", "lilt")
# These look for padding tokens, or shift labels by one, in forward.
_NEED_PADDING: tuple[Task, ...] = ("seq2seq_lm", "speech_seq2seq", "sequence_classification")
_LAYER_DROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def prepare(source: Source, task: Task, length: int | None, trained: bool) -> tuple[str, ...]:
    """Adjust a configuration for sequences of ``length`` tokens (None: no text); what was changed, for people.

    Raises WorkloadError where the positions do not suffice and cannot be changed.
    """
    _add_padding(source.config, task)
    return (*_keep_layers(source.config), *_fit_positions(source, task, length, trained))


def _add_padding(config: Any, task: Task) -> None:
    if task in _NEED_PADDING and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # as T5 does


def _keep_layers(config: Any) -> tuple[str, ...]:
    """LayerDrop off: a plan needs the same layers in every step."""
    dropped = [name for name in _LAYER_DROP if getattr(config, name, None)]
    for name in dropped:
        setattr(config, name, 0.0)
    return (f"{' and '.join(dropped)} set to 0: a plan needs the same layers in every step",) if dropped else ()


def _fit_positions(source: Source, task: Task, length: int | None, trained: bool) -> tuple[str, ...]:
    config = source.config.get_text_config()
    if length is None or task not in (*TEXT, "speech_seq2seq"):
        return ()
    name = "max_target_positions" if task == "speech_seq2seq" else "max_position_embeddings"
    limit = getattr(config, name, None)
    if not isinstance(limit, int) or limit <= 0:
        return ()
    needed = length + _offset(config)
    if needed <= limit:
        return ()
    room = limit - _offset(config)
    if trained or task == "speech_seq2seq":
        raise WorkloadError(
            f"{source.where} has {room} positions, so sequences of {length} tokens do not fit",
            remedy=f"Use --seq-len {room} or less{', or random weights' if trained else ''}.",
        )
    setattr(config, name, needed)
    return (f"{name} raised from {limit} to {needed} for sequences of {length} tokens",)


def _offset(config: Any) -> int:
    model_type = str(getattr(config, "model_type", ""))
    if any(part in model_type for part in _OFFSET):
        return int(getattr(config, "pad_token_id", None) or 0) + 1
    return 0
