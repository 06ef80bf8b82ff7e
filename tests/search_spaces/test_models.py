"""The shipped model shapes: valid, complete, and as large as the models they stand for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from autockpt.errors import UsageError
from autockpt.schema.workload import WorkloadSpec
from autockpt.shipped import list_models, load_model_shape
from autockpt.workload.configs import find_config, head_of
from tests.errors import raises


def build_on_meta(name: str) -> torch.nn.Module:
    import transformers

    source = find_config(WorkloadSpec(model=name))
    head = head_of(source.config, source.architecture, name)
    with torch.device("meta"):
        return getattr(transformers, head.cls)(source.config)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_models())
def test_shape_has_the_stated_number_of_parameters(name: str) -> None:
    shape = load_model_shape(name)
    model = build_on_meta(name)
    assert sum(p.numel() for p in model.parameters()) == shape.params
    assert shape.description and shape.source
    assert (shape.defaults.seq_len is None) == (model.main_input_name == "pixel_values")


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2", 124_439_808),
        ("bert-base", 109_514_298),
        ("vit-base", 86_567_656),
        ("resnet-50", 25_557_032),
        ("llama-1b", 1_235_814_400),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("mistral-7b", 7_248_023_552),
        ("qwen2.5-7b", 7_615_616_512),
        ("mixtral-8x7b", 46_702_792_704),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gpt-oss-20b", 20_914_757_184),
        ("gemma3-1b", 999_885_952),
    ],
)
def test_real_models_have_the_published_size(name: str, published: int) -> None:
    assert load_model_shape(name).params == published


def test_unknown_shape_suggests_the_nearest() -> None:
    with raises(UsageError, "llama-tiny"):
        load_model_shape("lama-tiny")


@pytest.mark.slow
def test_loading_needs_no_torch() -> None:
    code = (
        "import sys; from autockpt import shipped; "
        "[shipped.load_model_shape(n) for n in shipped.list_models()]; "
        "[shipped.load_hardware(n) for n in shipped.list_hardware()]; "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=900)
