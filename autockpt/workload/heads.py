"""Which model class trains a configuration, and what kind of task that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from autockpt.errors import WorkloadError

Task = Literal[
    "causal_lm",
    "seq2seq_lm",
    "masked_lm",
    "sequence_classification",
    "token_classification",
    "image_classification",
    "speech_seq2seq",
    "ctc",
    "audio_classification",
]
TEXT: tuple[Task, ...] = ("causal_lm", "seq2seq_lm", "masked_lm", "sequence_classification", "token_classification")


@dataclass(frozen=True)
class Head:
    """A model class by name, its task, and the Auto class that makes it if ``remote`` code. ``note`` is for people."""

    cls: str
    task: Task
    auto: str
    note: str | None = None
    remote: bool = False


# transformers' own tables, in the order in which they are asked for a configuration that names no class of its own.
_TABLES: tuple[tuple[str, Task, str], ...] = (
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "seq2seq_lm", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "speech_seq2seq", "AutoModelForSpeechSeq2Seq"),
    ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "masked_lm", "AutoModelForMaskedLM"),
    ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "causal_lm", "AutoModelForCausalLM"),
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "image_classification", "AutoModelForImageClassification"),
    ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "causal_lm", "AutoModelForImageTextToText"),
    ("MODEL_FOR_CTC_MAPPING_NAMES", "ctc", "AutoModelForCTC"),
    ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", "audio_classification", "AutoModelForAudioClassification"),
    (
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "sequence_classification",
        "AutoModelForSequenceClassification",
    ),
    ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", "token_classification", "AutoModelForTokenClassification"),
)
_TEXT_ONLY = "the batch is text only: images take more memory, so write a factory to plan for them"
_NOTES = {"AutoModelForImageTextToText": _TEXT_ONLY}
BY_HAND = "Write a function that returns (model, batch) and pass it as --model package.module:function."
_ENCODER_DECODER: tuple[Task, ...] = ("seq2seq_lm", "speech_seq2seq")


def head_of(config: Any, architecture: str | None, where: str) -> Head:
    """The class to train: ``architecture`` or the one that ``config.architectures`` names, if it has a loss.

    Otherwise the first that transformers' tables know for the model type. Raises WorkloadError where there is none.
    """
    named = architecture or next(iter(getattr(config, "architectures", None) or ()), None)
    tables = _tables()
    for table, task, auto in tables:
        if named is not None and any(named in classes for classes in table.values()):
            return Head(named, task, auto, _NOTES.get(auto))
    encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    for table, task, auto in tables:
        if config.model_type not in table or (task in _ENCODER_DECODER) > encoder_decoder:
            continue
        cls = table[config.model_type][0]
        note = f"{named} has no loss of its own, so {cls} is trained" if named else None
        return Head(cls, task, auto, note or _NOTES.get(auto))
    raise WorkloadError(
        f"{where} has no head that autockpt knows to train ({named or config.model_type})",
        remedy=BY_HAND,
    )


def remote_head(config: Any, where: str) -> Head | None:
    """The head of a configuration whose model class is remote code; None where the class is transformers' own."""
    remote: dict[str, str] = getattr(config, "auto_map", None) or {}
    for _, task, auto in _TABLES:
        if auto in remote:
            return Head(remote[auto].rpartition(".")[2], task, auto, remote=True)
    if any(key.startswith("AutoModel") for key in remote):
        raise WorkloadError(
            f"the remote code of {where} offers no class with a loss",
            remedy=BY_HAND,
        )
    return None


def _tables() -> list[tuple[dict[str, tuple[str, ...]], Task, str]]:
    from transformers.models.auto import modeling_auto

    def listed(name: str) -> dict[str, tuple[str, ...]]:
        entries = dict(getattr(modeling_auto, name, {}))
        return {kind: (cls,) if isinstance(cls, str) else tuple(cls) for kind, cls in entries.items()}

    return [(listed(name), task, auto) for name, task, auto in _TABLES]
