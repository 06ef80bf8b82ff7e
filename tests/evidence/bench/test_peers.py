"""Every peer in the table keeps the contract: plain training's gradients, and the model as it was afterwards."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autockpt.devices import get_device
from autockpt.measuring import StepRunner
from autockpt.schema import WorkloadSpec
from autockpt.workload import build, discover_units
from tests.evidence.bench import worker
from tests.evidence.bench.peers import OUR_OWN, PEERS
from tests.measuring.small_workloads import Stack, make_workload

pytestmark = pytest.mark.slow

BUDGETS = {"70%": 0.7, "95%": 0.95}


@pytest.fixture(scope="module", params=["llama-tiny"])
def runner(request: pytest.FixtureRequest) -> Iterator[StepRunner]:
    spec = WorkloadSpec(model=request.param, batch_size=2, seq_len=32, optimizer="none")
    made = StepRunner(build(spec, torch.device("cpu")), get_device("cpu"))
    yield made
    made.close()


def settings_of(name: str, runner: StepRunner) -> list[Any]:
    """Settings as a bench would make them; of compiled ones two, with a backend that needs no compiler."""
    plain = worker.prepare(runner, {"peer": "save everything", "setting": {"recompute": []}})["peak_bytes"]
    units = [u for u in discover_units(runner.workload.model) if u.role == "block"]
    budgets = {text: int(plain * share) for text, share in BUDGETS.items()}
    payload = {"peer": name, "budgets": budgets, "plain_peak": plain}
    answer = worker.settings(runner, payload)
    assert "failed" not in answer, answer
    if name == "torch.compile":
        return [[f"{b}", {"budget": b, "backend": "aot_eager_decomp_partition"}] for b in (1.0, 0.2)]
    if name == "recompute all compiled":
        return [["", {"backend": "aot_eager_decomp_partition"}]]
    if name in OUR_OWN:
        choices = {u.name: "recompute" for u in units}
        return [["70%", {"choices": choices, "backend": "aot_eager_decomp_partition"}]]
    return answer["settings"]


ROWS = [("deepseek-tiny" if name == "parts" else "llama-tiny", name) for name in PEERS]


@pytest.mark.campaign
@pytest.mark.parametrize(("runner", "name"), ROWS, indirect=["runner"])
def test_gradients_are_plain_and_detaching_restores(name: str, runner: StepRunner) -> None:
    # what only a device without a need for it lacks can be tried all the same, and a backend that needs no compiler
    if PEERS[name].group != "compiled" and PEERS[name].missing("cuda"):
        pytest.skip(PEERS[name].missing("cuda"))
    model = runner.workload.model
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    found = settings_of(name, runner)
    assert found
    assert len({label for label, _ in found}) == len(found), "labels tell settings apart"
    for label, setting in found:
        answer = worker.prepare(runner, {"peer": name, "setting": setting})
        assert answer["state"] == "measured", (label, answer)
        assert answer["gradients"] == "bit-equal" or not PEERS[name].exact, (label, answer)
        assert {path: dict(vars(module)) for path, module in model.named_modules()} == before, label
    assert all(p.grad is None for p in model.parameters())


def _longer(module: nn.Module, arguments: Any, output: Any) -> Any:
    return output * 1.5


def test_wrong_gradients_and_failures_are_no_measurements(runner: StepRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        exact = True
        group = "eager"

        def __init__(self, what: str) -> None:
            self.what = what

        def attach(self, model: nn.Module, units: list[str], setting: dict[str, Any]) -> Any:
            if self.what == "fails":
                raise ValueError("no such\nop")
            handle = model.get_submodule(units[0]).register_forward_hook(_longer)
            if self.what == "full":
                handle.remove()
                raise MemoryError("no memory")
            return handle.remove

    for what in ("wrong", "fails", "full"):
        monkeypatch.setitem(PEERS, what, Wrong(what))
    said = {w: worker.prepare(runner, {"peer": w, "setting": {}}) for w in ("wrong", "fails", "full")}
    assert said["wrong"]["state"] == "failed" and said["wrong"]["message"].startswith("wrong gradients")
    assert said["fails"] == {"state": "failed", "message": "ValueError: no such op"}
    assert said["full"]["state"] == "out_of_memory"


@pytest.mark.parametrize("growing", [False, True])
def test_a_reference_starts_from_the_candidates_state(growing: bool) -> None:
    # what timed steps change: running statistics of a norm outside the units, and a scaler's scale
    scaler = torch.amp.GradScaler("cpu", growth_interval=1) if growing else None
    made = StepRunner(make_workload(Stack(norm=not growing), scaler=scaler), get_device("cpu"))
    rows = [("save everything", {"recompute": []}), ("recompute all", {"recompute": [0, 1, 2, 3]})]
    try:
        answers = [worker.prepare(made, {"peer": peer, "setting": setting}) for peer, setting in rows * 2]
    finally:
        made.close()
    assert [(a["state"], a.get("gradients")) for a in answers] == [("measured", "bit-equal")] * 4, answers
