"""Each configuration gets the class that people train it with."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from autockpt.errors import WorkloadError
from autockpt.workload.heads import head_of, remote_head


@pytest.mark.parametrize(
    ("model_type", "cls", "task"),
    [
        ("llama", "LlamaForCausalLM", "causal_lm"),
        ("gpt2", "GPT2LMHeadModel", "causal_lm"),
        ("bert", "BertForMaskedLM", "masked_lm"),
        ("roberta", "RobertaForMaskedLM", "masked_lm"),
        ("t5", "T5ForConditionalGeneration", "seq2seq_lm"),
        ("bart", "BartForConditionalGeneration", "seq2seq_lm"),
        ("whisper", "WhisperForConditionalGeneration", "speech_seq2seq"),
        ("vit", "ViTForImageClassification", "image_classification"),
        ("resnet", "ResNetForImageClassification", "image_classification"),
        ("wav2vec2", "Wav2Vec2ForCTC", "ctc"),
        ("llava", "LlavaForConditionalGeneration", "causal_lm"),
    ],
)
def test_by_model_type(model_type: str, cls: str, task: str) -> None:
    head = head_of(AutoConfig.for_model(model_type), None, model_type)
    assert (head.cls, head.task) == (cls, task)


def test_a_named_class_wins_if_it_has_a_loss() -> None:
    config = AutoConfig.for_model("bert", architectures=["BertForTokenClassification"])
    assert head_of(config, None, "x").task == "token_classification"
    assert head_of(config, "BertLMHeadModel", "x").task == "causal_lm"
    config.architectures = ["BertModel"]
    head = head_of(config, None, "x")
    assert head.cls == "BertForMaskedLM" and head.note is not None


def test_images_of_multimodal_models_are_left_out_aloud() -> None:
    assert "text only" in str(head_of(AutoConfig.for_model("llava"), None, "x").note)


def test_models_without_a_known_head_are_explained() -> None:
    with pytest.raises(WorkloadError, match=r"package\.module:function"):
        head_of(AutoConfig.for_model("vits"), None, "x")


def test_remote_code_says_itself_what_it_is() -> None:
    config = AutoConfig.for_model("llama")
    assert remote_head(config, "x") is None
    config.auto_map = {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.MyModel"}
    head = remote_head(config, "x")
    assert head is not None and (head.cls, head.task, head.remote) == ("MyModel", "causal_lm", True)
    config.auto_map = {"AutoModel": "m.MyModel"}
    with pytest.raises(WorkloadError, match="no class with a loss"):
        remote_head(config, "x")
