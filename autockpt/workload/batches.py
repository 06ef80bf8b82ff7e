"""Batches made from a model's configuration: padded as a data collator pads them, the same for the same seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autockpt.errors import WorkloadError
from autockpt.workload.configs import BY_HAND, TEXT, Task

IGNORE = -100
_MASKED_SHARE = 0.15
_DEFAULT_IMAGE = 224


@dataclass(frozen=True, kw_only=True)
class BatchMaker:
    """Makes the batch of one task.

    ``length`` is the longest sequence, which all are padded to; without a mask (``packed``) every sequence is as long.
    Numbers come from a ``generator`` of its own, so that the global random state is left alone.
    """

    config: Any
    rows: int
    length: int
    packed: bool
    generator: torch.Generator

    def make(self, task: Task, dtype: torch.dtype) -> dict[str, Tensor]:
        """The batch on the CPU; ``dtype`` is that of images. Raises WorkloadError where none can be made."""
        batch = self._text(task) if task in TEXT else self._images()
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}

    def _text(self, task: Task) -> dict[str, Tensor]:
        """Token ids with labels. Of seq2seq these are as long, and the model shifts them into the decoder's inputs."""
        ids, mask = self._tokens()
        if task == "sequence_classification":
            labels = self._classes((self.rows,))
        else:
            labels, counts = ids, mask != 0
            if task == "seq2seq_lm":
                labels, label_mask = self._tokens()
                counts = label_mask != 0
            elif task == "token_classification":
                labels = self._classes((self.rows, self.length))
            elif task == "masked_lm":
                chosen = torch.rand(ids.shape, generator=self.generator) < _MASKED_SHARE
                chosen[:, 0] = True  # never none at all
                counts &= chosen
            labels = labels.masked_fill(~counts, IGNORE)
        batch = {"input_ids": ids, "labels": labels}
        return batch if self.packed else {**batch, "attention_mask": mask}

    def _images(self) -> dict[str, Tensor]:
        vision = getattr(self.config, "vision_config", None) or self.config
        size = getattr(vision, "image_size", None) or _DEFAULT_IMAGE
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        shape = (self.rows, getattr(vision, "num_channels", None) or 3, height, width)
        pixels = torch.randn(shape, generator=self.generator)
        return {"pixel_values": pixels, "labels": self._classes((self.rows,))}

    def _tokens(self) -> tuple[Tensor, Tensor]:
        """(ids, mask), both rows × length, int64. Lengths vary from half of ``length`` up to it."""
        lengths = torch.randint((self.length + 1) // 2, self.length + 1, (self.rows,), generator=self.generator)
        lengths[0] = self.length
        if self.packed:
            lengths.fill_(self.length)
        mask = (torch.arange(self.length) < lengths[:, None]).long()
        ids = torch.randint(0, self._vocabulary(), (self.rows, self.length), generator=self.generator)
        special = _special_ids(self.config)
        neutral = next(i for i in range(len(special) + 1) if i not in special)
        for token in special:
            ids.masked_fill_(ids == token, neutral)
        pad = getattr(self.config.get_text_config(), "pad_token_id", None)
        return ids.masked_fill_(mask == 0, pad if isinstance(pad, int) and pad >= 0 else neutral), mask

    def _vocabulary(self) -> int:
        size = getattr(self.config.get_text_config(), "vocab_size", None)
        if not isinstance(size, int) or size < 2:
            what = f"autockpt has no ready-made batch for {self.config.model_type} models"
            raise WorkloadError(what, remedy=BY_HAND)
        return size

    def _classes(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(0, max(int(getattr(self.config, "num_labels", 2)), 1), shape, generator=self.generator)


def _special_ids(config: Any) -> list[int]:
    """Ids that mean something to the model (padding, image places, ...), which random text must not contain."""
    found: set[int] = set()
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in vars(part).items():
            if name.endswith(("_token_id", "_token_index")):
                values = value if isinstance(value, (list, tuple)) else [value]
                found.update(v for v in values if isinstance(v, int) and v >= 0)
    return sorted(found)
