"""Which architectures there are: transformers' auto mappings, one class per type of config."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.models.auto import modeling_auto

# In this order: a config that several tasks know is tried in the first of them. Images before text alone, and what an
# encoder was made for before its use as a decoder.
TASKS = (
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "MASKED_IMAGE_MODELING",
    "SEMANTIC_SEGMENTATION",
    "OBJECT_DETECTION",
    "DEPTH_ESTIMATION",
)


@dataclass(frozen=True)
class Architecture:
    """A type of config (``llama``), the class that is trained for it, and the auto mapping that names the class."""

    name: str
    cls: str
    task: str


def architectures() -> list[Architecture]:
    """All of them, task by task; nothing is imported for it but the mappings."""
    found: dict[str, Architecture] = {}
    for task in TASKS:
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
        for name, cls in names.items():
            found.setdefault(name, Architecture(name, cls if isinstance(cls, str) else cls[0], task))
    return list(found.values())
