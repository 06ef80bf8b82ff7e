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


def test_remote_code_says_itself_what_it_is() -> None:
    config = AutoConfig.for_model("llama")
    assert remote_head(config, "x") is None
    config.auto_map = {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.MyModel"}
    head = remote_head(config, "x")
    assert head is not None and (head.cls, head.task, head.remote) == ("MyModel", "causal_lm", True)
    config.auto_map = {"AutoModel": "m.MyModel"}
    with pytest.raises(WorkloadError):
        remote_head(config, "x")
