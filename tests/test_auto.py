"""``import autockpt.auto`` in real scripts, each a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
START = """\
import autockpt.auto
import torch
from torch import nn
from tests.policies.zoo import CASES, assert_equal

LLAMA = CASES["llama"]

def step(model):
    torch.manual_seed(1)
    output = model(**LLAMA.batch())
    output.loss.backward()
    return output

def has_plan(model):
    from autockpt.runtime import attached_path
    return attached_path(model) is not None
"""
PLAN = "autockpt: 1\nchoices: {model.layers.0: recompute, model.layers.1: save, model.layers.2: offload}\n"


@pytest.fixture
def script(tmp_path: Path):
    def run(code: str, plan: str | None = PLAN, **environment: str) -> subprocess.CompletedProcess[str]:
        inherited = {k: v for k, v in os.environ.items() if k not in ("AUTOCKPT_PLAN", "RANK")}
        settings = inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        if plan is not None:
            (tmp_path / "plan.yaml").write_text(plan)
            settings["AUTOCKPT_PLAN"] = "plan.yaml"
        (tmp_path / "train.py").write_text(START + code)
        line = [sys.executable, "train.py"]
        done = subprocess.run(
            line, capture_output=True, text=True, cwd=tmp_path, env=settings | environment, timeout=300
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


def test_the_first_training_step_has_the_plan(script) -> None:
    """From its very first call on: gradients, no KV cache at the root, and nothing left in the way afterwards."""
    done = script("""
call = nn.Module.__call__
model = LLAMA.make()
with torch.no_grad():
    assert model(**LLAMA.batch()).past_key_values is not None
assert not has_plan(model)
assert step(model).past_key_values is None and has_plan(model)
assert nn.Module.__call__ is not call and nn.Module.__call__.__module__ == "torch.nn.modules.module"
plain = LLAMA.make()
plain.config.use_cache = False
step(plain)
assert not has_plan(plain)
assert_equal({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in plain.named_parameters()})
""")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("autockpt: plan.yaml is attached to LlamaForCausalLM") == 1
    assert "model.layers.0  recompute" in done.stderr and not done.stdout


def test_the_model_that_fits_gets_it(script) -> None:
    """Inside other modules, beside other models, never a frozen teacher; compiled others are left in one graph."""
    done = script("""
other = torch.compile(CASES["sequential"].make(), fullgraph=True, backend="aot_eager")
other(CASES["sequential"].batch()).sum().backward()
gpt2 = CASES["gpt2"]
gpt2.make()(**gpt2.batch()).loss.backward()
teacher = LLAMA.make().requires_grad_(False)
teacher(**LLAMA.batch())

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm, self.extra = LLAMA.make(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    def forward(self, **batch):
        return self.lm(**batch)

pair = Pair()
step(pair)
assert has_plan(pair.lm) and not has_plan(teacher)
""")
    assert done.returncode == 0, done.stderr
    assert "attached to LlamaForCausalLM" in done.stderr and "nothing" not in done.stderr


def test_one_model_after_another(script) -> None:
    done = script("""
import gc
for _ in range(2):
    model = LLAMA.make()
    step(model)
    assert has_plan(model)
    del model
    gc.collect()
""")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is attached to") == 2


def test_a_plan_of_the_scripts_own_stays(script) -> None:
    done = script("""
import autockpt
model = LLAMA.make()
handle = autockpt.apply(model, "plan.yaml")
step(model)
handle.remove()
step(model)
assert not has_plan(model)
""")
    assert done.returncode == 0, done.stderr
    assert "has a plan already, which is left as it is" in done.stderr


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("gpt2 = CASES['gpt2']; gpt2.make()(**gpt2.batch()).loss.backward()", "GPT2LMHeadModel: plan.yaml:2: "),
        ("with torch.no_grad(): LLAMA.make()(**LLAMA.batch())", "this process called no model with gradients enabled"),
    ],
    ids=["another model", "no training"],
)
def test_nothing_attached_is_said_at_exit(script, code: str, why: str) -> None:
    done = script(code)
    assert done.returncode == 0
    assert f"plan.yaml was attached to nothing: {why}" in done.stderr
    assert "LlamaModel" not in done.stderr and "GPT2Model" not in done.stderr


def test_without_the_variable_nothing_happens(script) -> None:
    done = script("print(nn.Module.__call__.__name__)", plan=None)
    assert "AUTOCKPT_PLAN is not set" in done.stderr and done.stdout.strip() == "_wrapped_call_impl"


@pytest.mark.parametrize(
    ("code", "plan", "said"),
    [
        ("step(LLAMA.make())", "choices: 3", "this is not a plan"),
        ("step(LLAMA.make())", "autockpt: 1\nchoices: {model.layers.0: recompte}", "Did you mean recompute?"),
        ("m = LLAMA.make(); m.gradient_checkpointing_enable(); step(m)", PLAN, "Switch one off"),
    ],
)
def test_what_is_wrong_is_one_screen_and_ends_the_script(script, code: str, plan: str, said: str) -> None:
    done = script(f"{code}\nprint('went on')", plan=plan)
    assert done.returncode == 2 and not done.stdout
    assert "autockpt: error: " in done.stderr and said in done.stderr and "nothing" not in done.stderr


def test_one_of_several_processes_speaks(script) -> None:
    done = script("step(LLAMA.make())", RANK="1")
    assert done.returncode == 0 and "autockpt" not in done.stderr
