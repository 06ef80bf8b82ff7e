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
    ("data", "message"),
    [
        ('{\n "model_type":\n}', r"c\.json:3 is not JSON"),
        ([1], "has no model_type"),
        ({}, "has no model_type"),
        ({"model_type": "lama"}, "Did you mean llama"),
        ({"model_type": "llama", "hidden_size": "wide"}, "hidden_size"),
        ({"model_type": "llama", "num_hidden_layers": -3}, "num_hidden_layers: -3"),
        ({"model_type": "qwen2", "num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000"),
        ({"model_type": "gpt2", "n_layer": 20_000}, "n_layer: 20000"),
        ({"model_type": "llava", "text_config": {"num_hidden_layers": 20_000}}, "Models of 0 to 2,000 layers"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, "--trust-remote-code"),
    ],
)
def test_bad_files(tmp_path: Path, data: object, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        find(write(tmp_path / "c.json", data))


@pytest.mark.parametrize("name", ["no/such/file.json", "./nothing", "/nothing", "two words", "~nobody"])
def test_paths_to_nothing(name: str) -> None:
    with pytest.raises(WorkloadError, match="there is no file or directory"):
        find(name)


def test_directory_without_configuration(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"holds no config\.json"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama-tiny", "Did you mean llama-tiny"),
        ("LLAMA-8B", "Did you mean llama-8b"),
        ("nobody/nothing", "the hub cannot be reached"),
        ("something-else-entirely", "the hub cannot be reached"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        find(name)


def test_the_hubs_refusals_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    answers = {
        "gated/model": (OSError("You are trying to access a gated repo."), "hf auth login"),
        "own/code": (ValueError("pass the argument `trust_remote_code=True`"), "--trust-remote-code"),
        "no/model": (OSError("no/model is not a valid model identifier"), "could not be had"),
        "odd/model": (KeyError("odd"), "is not valid"),
    }

    def refuse(name: str, *, local_files_only: bool = False, **_: object) -> None:
        raise OSError("not cached") if local_files_only and name != "own/code" else answers[name][0]

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    monkeypatch.setattr(configs, "hub_reachable", lambda: True)
    for name, (_, message) in answers.items():
        with pytest.raises(WorkloadError, match=message):
            find(name)


def test_reachability_is_asked_of_the_name_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [])
    assert configs.hub_reachable()

    def fail(*_: object) -> None:
        raise OSError("no such host")

    monkeypatch.setattr("socket.getaddrinfo", fail)
    assert not configs.hub_reachable()
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert configs.hub_reachable()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert not configs.hub_reachable()
