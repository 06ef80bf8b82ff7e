"""One stage of a pipeline out of a model of transformers, by the plan for pipelines that comes with its configuration.

Modules keep the names that they have in the whole model, so one plan serves a stage however it is cut out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autockpt.errors import UsageError
from autockpt.schema.workload import STAGE, WorkloadSpec
from autockpt.workload.losses import inner_model


class Elsewhere(nn.Module):
    """Stands for a module that another stage has: hands on what it is given."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """The same hidden states."""
        return hidden


def hidden_states(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """What a stage that is not the last sends on."""
    return inner_model(model).base_model(**batch, use_cache=False)[0]  # type: ignore[operator]


def cut(model: nn.Module, batch: dict[str, Any], spec: WorkloadSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """The batch of ``spec.stage`` and what else its Step needs. The model loses its other parts; layers divide evenly.

    Raises UsageError for a model that has no plan for pipelines, or fewer layers than stages.
    """
    match = STAGE.fullmatch(spec.stage or "")
    assert match is not None
    number, stages = int(match[1]), int(match[2])
    inner: Any = inner_model(model)
    base = getattr(inner, "base_model", inner)
    names = list(getattr(getattr(base, "config", None), "base_model_pp_plan", None) or ())
    at = next((i for i, name in enumerate(names) if isinstance(getattr(base, name, None), nn.ModuleList)), None)
    if at is None or len(getattr(base, names[at])) < stages:
        raise UsageError(
            f"{type(inner).__name__} cannot be cut into {stages} stages: "
            + ("transformers has no plan for it" if at is None else "it has fewer layers"),
            remedy="Name a function instead of the model that returns autockpt.Step(stage, batch, in_flight=k).",
        )
    first, last, layers = number == 0, number == stages - 1, getattr(base, names[at])
    for name in (*(() if first else names[:at]), *(() if last else names[at + 1 :])):
        setattr(base, name, Elsewhere())
    for i in range(len(layers)):
        if i * stages // len(layers) != number:
            layers[i] = Elsewhere()
    if not last:
        inner.set_output_embeddings(Elsewhere())
        batch = {name: value for name, value in batch.items() if name != "labels"}
    if not first:
        ids = batch["input_ids"]
        dtype = next(p.dtype for p in base.parameters() if p.is_floating_point())
        size = (*ids.shape, base.config.get_text_config().hidden_size)
        hidden = torch.randn(size, dtype=dtype, device=ids.device, requires_grad=True)
        batch = {name: value for name, value in batch.items() if name != "input_ids"} | {"inputs_embeds": hidden}
    held = spec.accumulate if match[3] == " gpipe" else min(spec.accumulate, stages - number)
    return batch, {"loss": None if last else hidden_states, "in_flight": held}
