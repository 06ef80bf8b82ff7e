"""Configurations are adjusted for the step, and people are told."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from autockpt.errors import WorkloadError
from autockpt.workload.configs import ConfigSource, prepare


def source(model_type: str, **config: Any) -> ConfigSource:
    return ConfigSource(AutoConfig.for_model(model_type, **config), model_type)


def test_positions_are_raised_only_where_needed() -> None:
    s = source("bert")
    assert prepare(s, "masked_lm", 512, False) == () and s.config.max_position_embeddings == 512
    assert "512 to 600" in prepare(s, "masked_lm", 600, False)[0] and s.config.max_position_embeddings == 600
    assert prepare(source("t5"), "seq2seq_lm", 5000, False) == ()
    assert prepare(source("vit"), "image_classification", None, False) == ()


def test_roberta_counts_positions_from_behind_the_padding_token() -> None:
    s = source("roberta", max_position_embeddings=514, pad_token_id=1)
    assert prepare(s, "masked_lm", 512, False) == ()
    assert "514 to 515" in prepare(s, "masked_lm", 513, False)[0]


def test_trained_positions_cannot_be_raised() -> None:
    with pytest.raises(WorkloadError, match="512 positions"):
        prepare(source("bert"), "masked_lm", 513, True)
    with pytest.raises(WorkloadError, match="448 positions"):
        prepare(source("whisper"), "speech_seq2seq", 449, False)


def test_layers_are_never_skipped_at_random() -> None:
    s = source("bart", encoder_layerdrop=0.1, decoder_layerdrop=0.0)
    assert prepare(s, "seq2seq_lm", 8, False) == (
        "encoder_layerdrop set to 0: a plan needs the same layers in every step",
    )
    assert s.config.encoder_layerdrop == 0.0


def test_padding_is_defined_only_where_forward_looks_for_it() -> None:
    s = source("llama")
    prepare(s, "causal_lm", 8, False)
    assert s.config.pad_token_id is None
    prepare(s, "sequence_classification", 8, False)
    assert s.config.pad_token_id == 0
    t5 = source("t5")
    prepare(t5, "seq2seq_lm", 8, False)
    assert t5.config.decoder_start_token_id == t5.config.pad_token_id
