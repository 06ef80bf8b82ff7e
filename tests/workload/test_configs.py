"""Every form of a model's name is understood, and every mistake is explained without the network."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from autockpt.errors import WorkloadError
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import build, configs, discover_units
from autockpt.workload.configs import ConfigSource, class_to_train, find_config, shallow_twin


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "hub_reachable", lambda: False)


def find(name: object) -> ConfigSource:
    return find_config(WorkloadSpec(model=str(name)))


def write(path: Path, data: object) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_built_in_shape() -> None:
    source = find("bert-base")
    assert source.config.model_type == "bert" and source.architecture == "BertForMaskedLM"
    assert source.defaults is not None and source.defaults.seq_len == 512


def test_file_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "config.json", {"model_type": "llama", "num_hidden_layers": 3})
    assert find(file).config.num_hidden_layers == 3
    (tmp_path / "gpt2").mkdir()
    write(tmp_path / "gpt2" / "config.json", {"model_type": "gpt2", "n_layer": 7})
    monkeypatch.chdir(tmp_path)
    assert find("gpt2").config.n_layer == 7  # what is here comes before what is built in
    (tmp_path / "llama-tiny").mkdir()
    assert find("llama-tiny").defaults is not None  # but not an unrelated directory


@pytest.mark.parametrize(
    "data",
    [
        '{\n "model_type":\n}',
        {},
        {"model_type": "lama"},
        {"model_type": "llama", "hidden_size": "wide"},
        {"model_type": "qwen2", "num_hidden_layers": 10**9},
        {"model_type": "llama", "num_hidden_layers": -3},
        {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}},
    ],
)
def test_bad_files(tmp_path: Path, data: object) -> None:
    with pytest.raises(WorkloadError):
        find(write(tmp_path / "c.json", data))


NOWHERE = ["no/such/file.json", "./nothing", "/nothing", "two words", "~nobody"]


@pytest.mark.parametrize("name", [*NOWHERE, "lama-tiny", "LLAMA-8B", "nobody/nothing", "something-else-entirely"])
def test_paths_to_nothing_and_unknown_names(name: str) -> None:
    with pytest.raises(WorkloadError):
        find(name)


# --- each configuration gets the class that people train it with


@pytest.mark.parametrize(
    ("model_type", "cls", "task"),
    [
        ("llama", "LlamaForCausalLM", "causal_lm"),
        ("gpt2", "GPT2LMHeadModel", "causal_lm"),
        ("bert", "BertForMaskedLM", "masked_lm"),
        ("roberta", "RobertaForMaskedLM", "masked_lm"),
        ("t5", "T5ForConditionalGeneration", "seq2seq_lm"),
        ("bart", "BartForConditionalGeneration", "seq2seq_lm"),
        ("vit", "ViTForImageClassification", "image_classification"),
        ("resnet", "ResNetForImageClassification", "image_classification"),
        ("llava", "LlavaForConditionalGeneration", "causal_lm"),
    ],
)
def test_by_model_type(model_type: str, cls: str, task: str) -> None:
    trained = class_to_train(ConfigSource(AutoConfig.for_model(model_type), model_type))
    assert (trained.name, trained.task) == (cls, task)


def test_remote_code_says_itself_what_it_is() -> None:
    source = ConfigSource(config := AutoConfig.for_model("llama"), "x")
    assert not class_to_train(source, own_code=True).remote
    config.auto_map = {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.MyModel"}
    trained = class_to_train(source, own_code=True)
    assert (trained.name, trained.task, trained.remote) == ("MyModel", "causal_lm", True)
    assert not class_to_train(source).remote
    config.auto_map = {"AutoModel": "m.MyModel"}
    with pytest.raises(WorkloadError):
        class_to_train(source, own_code=True)
    with pytest.raises(WorkloadError):
        class_to_train(ConfigSource(AutoConfig.for_model("whisper"), "whisper", "WhisperForConditionalGeneration"))


# --- the same model but for its depth


@pytest.mark.parametrize(
    ("model", "stacks", "types"), [("llama-tiny", 1, 1), ("gemma3-tiny", 1, 3), ("bert-tiny", 1, 1), ("t5-tiny", 2, 1)]
)
def test_a_twin_has_one_block_of_each_type_and_the_same_batch(
    model: str, stacks: int, types: int, tmp_path: Path
) -> None:
    """Of Gemma 3 here the third layer is the first one without a sliding window."""
    whole = build(WorkloadSpec(model=model, batch_size=2))
    twin = shallow_twin(WorkloadSpec(model=model, batch_size=2), whole.settings, 1, tmp_path)
    assert twin is not None
    small = build(twin)
    blocks, fewer = ([u for u in discover_units(w.model) if u.role == "block"] for w in (whole, small))
    assert len(fewer) == stacks * types < len(blocks)
    begins = range(0, len(blocks), len(blocks) // stacks)
    assert [u.cls for u in fewer] == [u.cls for begin in begins for u in blocks[begin : begin + types]]
    assert {k: v.shape for k, v in whole.batch.items()} == {k: v.shape for k, v in small.batch.items()}
    assert small.settings["dtype"] == whole.settings["dtype"] and type(small.model) is type(whole.model)
