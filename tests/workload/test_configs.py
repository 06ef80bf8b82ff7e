"""Every form of a model's name is understood, and every mistake is explained without the network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autockpt.errors import WorkloadError
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import configs
from autockpt.workload.configs import ConfigSource, find_config


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
    assert source.pretrained == "google-bert/bert-base-uncased"
    assert source.defaults is not None and source.defaults.seq_len == 512


def test_file_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "config.json", {"model_type": "llama", "num_hidden_layers": 3})
    assert find(file).config.num_hidden_layers == 3 and find(file).pretrained is None
    assert find(tmp_path).pretrained == str(tmp_path)
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
        {"model_type": "llava", "text_config": {"num_hidden_layers": 20000}},
        {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}},
    ],
)
def test_bad_files(tmp_path: Path, data: object) -> None:
    with pytest.raises(WorkloadError):
        find(write(tmp_path / "c.json", data))


@pytest.mark.parametrize("name", ["no/such/file.json", "./nothing", "/nothing", "two words", "~nobody"])
def test_paths_to_nothing(name: str) -> None:
    with pytest.raises(WorkloadError):
        find(name)


@pytest.mark.parametrize("name", ["lama-tiny", "LLAMA-8B", "nobody/nothing", "something-else-entirely"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(WorkloadError):
        find(name)
