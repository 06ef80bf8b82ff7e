"""Batches for any architecture, from the signature of its forward, and a loss from whatever it returns."""

import inspect
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autockpt.workload.failures import summary

ROWS, LENGTH, PADDED = 2, 16, 3
_LANGUAGE = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "CTC")
_BINS = (
    "feature_projection_input_dim",
    "num_mel_bins",
    "feature_size",
    "input_feat_per_channel",
    "num_spectrogram_bins",
    "input_dim",
)


class Attempt(NamedTuple):
    """A batch to try, and what is to be said about it."""

    batch: dict[str, Any]
    remark: str = ""


def attempts(model: nn.Module, task: str) -> Iterator[Attempt]:
    """Batches from the fullest to the barest; the first one that trains is taken."""
    maker = _Maker(model, task)
    if "pixel_values" in maker.accepted and "input_ids" in maker.accepted and task == "IMAGE_TEXT_TO_TEXT":
        why = ""
        for several, sizes in product((False, True), (True, False)):
            try:
                yield Attempt(maker.with_images(several=several, sizes=sizes))
            except Exception as error:
                why = why or f", for with an image: {summary(error)}"
        yield Attempt(maker.text() | maker.images(), "image and text side by side")
        yield Attempt(maker.text(), f"text only{why}")
    else:
        yield Attempt(maker.full())
    full = maker.text() if task == "IMAGE_TEXT_TO_TEXT" and "input_ids" in maker.accepted else maker.full()
    if "attention_mask" in full:
        yield Attempt({k: v for k, v in full.items() if k != "attention_mask"}, "no padding mask")
    if "labels" in full:
        bare = {k: v for k, v in full.items() if k != "labels"}
        yield Attempt(maker.with_decoder(bare), "no labels: mean square of its outputs as loss")


def loss_of(model: nn.Module, batch: dict[str, Any], **extra: Any) -> Tensor:
    """The model's own loss, else the mean square of every floating-point output that gradients reach."""
    output = model(**batch, **extra)
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss if loss.dim() == 0 else loss.sum()
    parts = [t.float().pow(2).mean() for t in _floats(output) if t.requires_grad and t.numel()]
    if not parts:
        raise RuntimeError("it returns nothing that gradients could flow from")
    return torch.stack(parts).sum()


def _floats(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if name not in ("past_key_values", "cache_params"):
                yield from _floats(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _floats(value)


class _Maker:
    def __init__(self, model: nn.Module, task: str) -> None:
        self.model, self.task, self.config = model, task, model.config
        self.accepted = inspect.signature(model.forward).parameters
        self.generator = torch.Generator().manual_seed(3)
        text = self.config.get_text_config(decoder=True)
        vocabulary = getattr(text, "vocab_size", None) or getattr(self.config, "vocab_size", None)
        self.vocabulary = vocabulary if isinstance(vocabulary, int) else 64
        self.text_config = text

    def full(self) -> dict[str, Any]:
        """Whatever the forward's main input is, with labels where they are numbers."""
        main = getattr(self.model, "main_input_name", "input_ids")
        if main == "pixel_values" or ("pixel_values" in self.accepted and "input_ids" not in self.accepted):
            batch: dict[str, Any] = {"pixel_values": self.pixels(self.config)}
        elif main in ("input_features", "input_values") or "input_ids" not in self.accepted:
            name = main if main in self.accepted else next(iter(self.accepted))
            batch = {name: self.sound(name)}
        else:
            return self.text()
        return self._labelled(batch)

    def text(self) -> dict[str, Any]:
        batch: dict[str, Any] = {"input_ids": self.ids()}
        if "attention_mask" in self.accepted:
            batch["attention_mask"] = torch.ones(ROWS, LENGTH, dtype=torch.long)
            batch["attention_mask"][0, -PADDED:] = 0
        for name in ("qformer_input_ids", "bbox"):
            if name in self.accepted:
                batch[name] = torch.zeros(ROWS, LENGTH, 4, dtype=torch.long) if name == "bbox" else self.ids()
        return self._labelled(batch)

    def with_images(self, *, several: bool, sizes: bool) -> dict[str, Any]:
        """One image per row, with as many image tokens as the model makes features. Raises where that is not known.

        ``several``: in a dimension of its own, for models that take several images per row; ``sizes``: with the
        images' sizes, where the model takes them.
        """
        names = ("image_token_id", "image_token_index")
        token = next(t for n in names if isinstance(t := getattr(self.config, n, None), int))
        images = self.images()
        if not sizes:
            images.pop("image_sizes", None)
        if several:
            images["pixel_values"] = images["pixel_values"].unsqueeze(1)
        features = self.model.get_image_features
        wanted = inspect.signature(features).parameters
        with torch.no_grad():
            out = features(**{k: v for k, v in images.items() if k in wanted or k == "pixel_values"})
        count = _rows_of(out)
        if not count or count % ROWS:
            raise ValueError(f"{count} image features for {ROWS} images")
        before, after = self.ids()[:, :4], self.ids()[:, :8]
        ids = torch.cat([before, torch.full((ROWS, count // ROWS), token), after], 1)
        batch = {"input_ids": ids, **{k: v for k, v in images.items() if k in self.accepted}}
        if "attention_mask" in self.accepted:
            batch["attention_mask"] = torch.ones_like(ids)
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in self.accepted:
                batch[name] = (ids == token).long()
        return self._labelled(batch)

    def images(self) -> dict[str, Tensor]:
        return self._image_inputs(getattr(self.config, "vision_config", None) or self.config)

    def _image_inputs(self, vision: Any) -> dict[str, Tensor]:
        if "image_grid_thw" in self.accepted or "image_grid_hws" in self.accepted:
            patch, channels = vision.patch_size, getattr(vision, "in_channels", 3)
            side, frames = 4, getattr(vision, "temporal_patch_size", 1)
            values = torch.randn(ROWS * side * side, channels * frames * patch * patch, generator=self.generator)
            return {"pixel_values": values, "image_grid_thw": torch.tensor([[1, side, side]] * ROWS)}
        images = {"pixel_values": self.pixels(vision)}
        if "image_sizes" in self.accepted:
            images["image_sizes"] = torch.tensor([list(images["pixel_values"].shape[-2:])] * ROWS)
        return images

    def ids(self) -> Tensor:
        most = min(self.vocabulary, 100)
        return torch.randint(8, most, (ROWS, LENGTH), generator=self.generator)

    def pixels(self, config: Any) -> Tensor:
        size = next((s for n in ("image_size", "input_size", "img_size") if (s := getattr(config, n, None))), 32)
        if isinstance(size, Mapping):
            size = [size["height"], size["width"]]
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
        frames = getattr(config, "num_frames", None) if "VIDEO" in self.task else None
        shape = (ROWS, frames, channels, height, width) if frames else (ROWS, channels, height, width)
        return torch.randn(shape, generator=self.generator)

    def sound(self, name: str) -> Tensor:
        """Raw sound for models with a convolutional front end, else frames of features."""
        parts = (getattr(self.config, part, None) for part in ("encoder_config", "audio_config", "encoder"))
        config = next((part for part in parts if part is not None), self.config)
        if hasattr(config, "frequency_stride"):
            return self._normal(ROWS, config.max_length, config.num_mel_bins)
        if hasattr(config, "conv_kernel") or (name == "input_values" and not hasattr(config, "num_mel_bins")):
            return self._normal(ROWS, 4000)
        bins = next((b for n in _BINS if isinstance(b := getattr(config, n, None), int)), 16)
        if self.config.model_type == "whisper":
            return self._normal(ROWS, bins, 2 * int(config.max_source_positions))
        return self._normal(ROWS, 64, bins)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def with_decoder(self, batch: dict[str, Any]) -> dict[str, Any]:
        if getattr(self.config, "is_encoder_decoder", False) and "decoder_input_ids" in self.accepted:
            return {**batch, "decoder_input_ids": self.ids()}
        return batch

    def _labelled(self, batch: dict[str, Any]) -> dict[str, Any]:
        if "labels" not in self.accepted:
            return self.with_decoder(batch)
        if self.task == "CTC":
            return {**batch, "labels": self.ids()[:, :3]}
        if self.task in _LANGUAGE:
            if "input_ids" in batch:
                labels = batch["input_ids"].clone()
                mask = batch.get("attention_mask")
                return {**batch, "labels": labels if mask is None else labels.masked_fill(mask == 0, -100)}
            return {**batch, "labels": self.ids()}
        if "CLASSIFICATION" in self.task:
            return {**batch, "labels": torch.arange(ROWS) % max(getattr(self.config, "num_labels", 2), 1)}
        return self.with_decoder(batch)


def _rows_of(output: Any) -> int:
    """How many image features a model made, whatever it wraps them in."""
    pooled = getattr(output, "pooler_output", None)
    output = output if pooled is None else pooled
    if isinstance(output, Tensor):
        return output.numel() // output.shape[-1]
    if isinstance(output, (list, tuple)):
        return sum(_rows_of(part) for part in output)
    return 0
