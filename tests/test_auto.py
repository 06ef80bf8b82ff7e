"""``import autockpt.auto`` in scripts, each a process of its own."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import transformers.trainer  # noqa: F401  here, so that no fork has to

from autockpt.errors import InfeasibleError
from autockpt.tracing.process import can_fork
from tests.children import start_program

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
START = """\
import autockpt.auto
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(layers))
        self.grad_checkpointing = False
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def step(model):
    model(torch.ones(128, 64)).sum().backward()

def has_plan(model):
    from autockpt.runtime import attached_path
    return attached_path(model) is not None
"""
PLAN = "autockpt: 1\nchoices: {layers.0: recompute, layers.1: save, layers.2: offload}\n"
Result = subprocess.CompletedProcess[str]


def train() -> None:
    sys.modules.pop("autockpt.auto", None)
    runpy.run_path("train.py", run_name="__main__")


@pytest.fixture
def script(tmp_path: Path):
    """Runs a script, ``real`` as a process that was started afresh."""

    def run(
        code: str, plan: str | None = PLAN, start: str = START, real: bool = not can_fork(), **environment: str
    ) -> Result:
        inherited = {k: v for k, v in os.environ.items() if k not in ("AUTOCKPT_PLAN", "AUTOCKPT_BUDGET", "RANK")}
        settings = inherited | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        if plan is not None:
            (tmp_path / "plan.yaml").write_text(plan)
            settings["AUTOCKPT_PLAN"] = "plan.yaml"
        (tmp_path / "train.py").write_text(start + code)
        if real:
            line, environment = [sys.executable, "train.py"], settings | environment
            done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=900)
        else:
            done = start_program(train, tmp_path, settings | environment)()
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


def test_the_first_training_step_has_the_plan(script) -> None:
    """From its very first call on: the same gradients, no KV cache at the root, and nothing left in the way after."""
    done = script(
        """
from tests.policies.zoo import CASES, assert_equal
llama, call = CASES["llama"], nn.Module.__call__
model, plain = llama.make(), llama.make()
assert call.__name__ == "call"
with torch.no_grad():
    assert model(**llama.batch()).past_key_values is not None
assert not has_plan(model)
torch.manual_seed(1)
output = model(**llama.batch())
output.loss.backward()
assert type(output.past_key_values).__name__ == "DroppedCache" and has_plan(model)
assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
torch.manual_seed(1)
plain(**llama.batch(), use_cache=False).loss.backward()
assert not has_plan(plain)
assert_equal({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in plain.named_parameters()})
""",
        PLAN.replace("layers", "model.layers"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("autockpt: plan.yaml is attached to LlamaForCausalLM") == 1
    assert "model.layers.0  recompute" in done.stderr and not done.stdout


def test_the_model_that_fits_gets_it_and_then_the_next(script) -> None:
    """Inside other modules, beside other models, never a frozen teacher; compiled others are left in one graph."""
    done = script("""
import gc
step(torch.compile(nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()), fullgraph=True, backend="aot_eager"))
step(Net(layers=2))
teacher = Net().requires_grad_(False)
teacher(torch.ones(1, 64))

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.head = Net(), nn.Linear(64, 1)
    def forward(self, x):
        return self.head(self.net(x))

for _ in range(2):
    pair = Pair()
    step(pair)
    assert has_plan(pair.net) and not has_plan(teacher)
    del pair
    gc.collect()
""")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is attached to") == 2 and "attached to nothing" not in done.stderr


def test_a_plan_of_the_scripts_own_stays(script) -> None:
    done = script("""
import autockpt
model = Net()
handle = autockpt.apply(model, "plan.yaml")
step(model)
handle.remove()
step(model)
assert not has_plan(model)
""")
    assert done.returncode == 0, done.stderr
    assert "Net has a plan already, which is left as it is" in done.stderr


def test_training_without_the_plan_is_named_at_its_first_step(script) -> None:
    done = script("""
import sys
model = Net(2)
for _ in range(2):
    step(model)
    print("a step", file=sys.stderr)
step(Net())
""")
    said, *steps, attached = [line for line in done.stderr.splitlines() if line.startswith(("autockpt: ", "a step"))]
    assert said.startswith(
        "autockpt: Net goes without a plan: plan.yaml is not for it: plan.yaml:2: 'layers.2' matches"
    )
    assert steps == ["a step"] * 2 and "plan.yaml is attached to Net" in attached


def test_without_the_variable_nothing_happens(script) -> None:
    line = "import autockpt.auto, sys; print('torch' in sys.modules)"
    done = script(line, plan=None, start="", real=True)
    assert "neither AUTOCKPT_PLAN nor AUTOCKPT_BUDGET is set" in done.stderr and done.stdout == "False\n"
    assert not script(line, plan=None, start="", real=True, RANK="1").stderr  # one of several processes speaks


@pytest.mark.parametrize(
    ("code", "plan", "said"),
    [
        ("step(Net())", "autockpt: 1\nchoices: {layers.0: recompte}", "Did you mean recompute?"),
        ("m = Net(); m.grad_checkpointing = True; step(m)", PLAN, "Switch one off"),
    ],
)
def test_what_is_wrong_is_one_screen_and_ends_the_script(script, code: str, plan: str, said: str) -> None:
    done = script(f"{code}\nprint('went on')", plan=plan)
    assert done.returncode == 2 and not done.stdout
    assert "autockpt: error: " in done.stderr and said in done.stderr and "attached to nothing" not in done.stderr


TRAINER = """\
import autockpt.auto
from pathlib import Path
from autockpt.errors import InfeasibleError
from autockpt.integrations import transformers as callbacks
from autockpt.schema import Plan
from tests.integrations.test_transformers import LLAMA, trainer

def search(trainer, find, *args):  # as tests/integrations/test_at_start.py has it
    budget = find.__self__._request.budget.text
    if budget == "50KiB":
        raise InfeasibleError("nothing fits 50.0 KiB", remedy="Take more.")
    print("searched within", budget)
    return Plan(choices={"model.layers.0": "recompute"}, settings={"batch_size": 2, "accumulate": 1})

callbacks._search = search
"""


def test_a_budget_reaches_the_trainer(script) -> None:
    """It trains with the plan; where the next Trainer has checkpointing of its own, that ends the script."""
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    code = """
for own in (False, True):
    trainer(Path("out"), LLAMA.make(), [], max_steps=1, gradient_checkpointing=own).train()
    print("trained")
"""
    done = script(code, plan=None, start=TRAINER, AUTOCKPT_BUDGET="60%act")
    assert done.returncode == 2 and done.stdout.count("trained") == 1, done.stderr
    assert "searched within 60%act" in done.stdout and "applied plan" in done.stdout
    assert re.search("_checkpointing=True", done.stderr)


def test_an_infeasible_budget_ends_the_script_with_one_screen(script) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    code = 'trainer(Path("out"), LLAMA.make(), [], max_steps=1).train()'
    done = script(code, plan=None, start=TRAINER, AUTOCKPT_BUDGET="50KiB")
    assert done.returncode == InfeasibleError.exit_code and "Traceback" not in done.stderr
    assert "autockpt: error: nothing fits 50.0 KiB" in done.stderr


@pytest.mark.parametrize(
    ("environment", "status", "said"),
    [
        ({"AUTOCKPT_BUDGET": "24GB"}, 0, "AUTOCKPT_BUDGET changed nothing, because no Trainer"),
        ({"AUTOCKPT_BUDGET": "much"}, 2, "'much'"),
        ({"AUTOCKPT_BUDGET": "24GB", "AUTOCKPT_PLAN": "plan.yaml"}, 2, "are both set"),
        ({"AUTOCKPT_PLAN": "."}, 2, "is not the directory of a run"),
    ],
    ids=["no trainer", "malformed", "both", "a folder that is no run"],
)
def test_a_budget_that_cannot_be_used_is_said(script, environment: dict[str, str], status: int, said: str) -> None:
    done = script("step(Net())", plan=None, **environment)
    assert done.returncode == status and said in done.stderr
