"""The shipped model shapes: valid, complete, and as large as their files say, which are the published sizes."""

import pytest
import torch

from autockpt.schema.workload import WorkloadSpec
from autockpt.shipped import list_models, load_model_shape
from autockpt.workload.configs import class_to_train, find_config


def build_on_meta(name: str) -> torch.nn.Module:
    import transformers

    source = find_config(WorkloadSpec(model=name))
    trained = class_to_train(source)
    with torch.device("meta"):
        return getattr(transformers, trained.name)(source.config)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_models())
def test_shape_has_the_stated_number_of_parameters(name: str) -> None:
    shape = load_model_shape(name)
    model = build_on_meta(name)
    assert sum(p.numel() for p in model.parameters()) == shape.params
    assert shape.description and shape.source
    assert (shape.defaults.seq_len is None) == (model.main_input_name == "pixel_values")
