"""Lightning's Trainer with a plan leaves the same weights as without. Skipped where Lightning is not installed."""

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from autockpt.errors import UsageError
from autockpt.schema import Plan
from tests.errors import raises
from tests.integrations.runs import Runs, untouched
from tests.policies.zoo import CASES, assert_equal

LLAMA = CASES["llama"]
CHOICES = {"model.layers.0": "recompute", "model.layers.1": "save", "model.layers.2": "offload"}
LIBRARY = next((n for n in ("lightning.pytorch", "pytorch_lightning") if find_spec(n.partition(".")[0])), None)
needs_lightning = pytest.mark.skipif(LIBRARY is None, reason="neither lightning nor pytorch_lightning is installed")


def module(way: str) -> Any:
    """A LightningModule that calls its model in ``training_step``, or by way of its own ``forward``."""
    L = import_module(str(LIBRARY))

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = LLAMA.make()
            self.caches: list[bool] = []

        def forward(self, batch: dict[str, Tensor]) -> Any:
            return self.model(**batch)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            output = self(batch) if way == "forward" else self.model(**batch, use_cache=None)
            self.caches.append(isinstance(output.past_key_values, DynamicCache))
            return output.loss

        def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
            assert isinstance(self.model(**batch).past_key_values, DynamicCache)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def fit(model: Any, folder: Any, callbacks: list[Any], batch_size: int = 2, **more: Any) -> Any:
    L = import_module(str(LIBRARY))
    logging.getLogger(str(LIBRARY)).setLevel(logging.ERROR)
    L.seed_everything(1)
    batch = LLAMA.batch()
    rows = [{k: v[i] for k, v in batch.items()} for i in range(4)]
    loader = torch.utils.data.DataLoader(rows, batch_size=batch_size)  # type: ignore[arg-type]
    options: dict[str, Any] = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder}
    trainer = L.Trainer(callbacks=callbacks, **options | {"enable_checkpointing": False} | more)
    trainer.fit(model, loader, loader)
    return trainer


def callback() -> Any:
    from autockpt.integrations.lightning import AutockptLightningCallback

    return AutockptLightningCallback(Plan(choices=CHOICES))


@needs_lightning
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["forward", "its model"])
@pytest.mark.parametrize("more", [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}], ids=["fp32", "bf16"])
def test_the_same_weights_come_out(tmp_path, way, more):
    plain, planned, one = module(way), module(way), callback()
    fit(plain, tmp_path, [], **more)
    counted = Runs(planned)
    fit(planned, tmp_path, [one], **more)
    assert_equal(dict(planned.named_parameters()), dict(plain.named_parameters()))
    assert counted.again == counted.trained == 4 and not any(planned.caches)
    assert untouched(planned) and "removed" in str(one.handle)


@needs_lightning
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_budget_leaves_the_same_as_the_plan_it_found(tmp_path, capfd):
    """Accumulation, autocast, and a step that logs."""
    from autockpt.integrations.lightning import AutockptLightningCallback

    def logging_module() -> Any:
        made = module("its model")
        plain = made.training_step

        def training_step(batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = plain(batch, batch_idx)
            made.log("loss", loss)
            return loss

        made.training_step = training_step
        return made

    more: dict[str, Any] = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "max_epochs": 4}
    found, planned = logging_module(), logging_module()
    one = AutockptLightningCallback(budget="60%act", trials=1, choices=("save", "recompute"))
    told = fit(found, tmp_path, [one], enable_progress_bar=True, **more)
    said = capfd.readouterr().out
    assert "the plan was found in" in said and said.count("autockpt: applied plan ") == 1
    (plan,) = tmp_path.glob("autockpt/*/plan.yaml")
    same = fit(planned, tmp_path, [AutockptLightningCallback(plan)], **more)
    assert_equal(dict(found.named_parameters()), dict(planned.named_parameters()))
    assert told.logged_metrics == same.logged_metrics != {}
    assert untouched(found)


@needs_lightning
@pytest.mark.filterwarnings("ignore")
def test_a_failed_run_leaves_no_plan_and_saved_weights_resume(tmp_path):
    L = import_module(str(LIBRARY))

    class Stop(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "half.ckpt")
                raise RuntimeError("out of luck")

    whole, half = module("forward"), module("forward")
    fit(whole, tmp_path, [])
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(half, tmp_path, [callback(), Stop()])
    assert untouched(half)
    state = torch.load(tmp_path / "half.ckpt", weights_only=False)["state_dict"]
    assert list(state) == list(whole.state_dict())


@pytest.mark.skipif(LIBRARY is not None, reason="Lightning is installed")
def test_without_lightning_it_says_what_to_install():
    with raises(UsageError, "pip install lightning"):
        callback()
