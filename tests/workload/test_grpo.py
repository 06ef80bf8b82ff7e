"""The described step of GRPO: log-probabilities of completions and their gradients, with the bytes that it promises."""

import pytest
import torch
from pydantic import ValidationError

from autockpt.devices.cpu import CpuDevice
from autockpt.errors import UsageError
from autockpt.schema import WorkloadSpec
from autockpt.tracing import Tracer
from autockpt.workload import build
from autockpt.workload.grpo import COLUMNS
from tests.errors import raises

PROMPT = 12


def spec(**more) -> WorkloadSpec:
    return WorkloadSpec(**{"model": "llama-tiny", "batch_size": 3, "seq_len": 40, "grpo_prompt_len": PROMPT} | more)


def test_scores_and_gradients_are_those_of_all_logits(monkeypatch):
    monkeypatch.setattr("autockpt.workload.grpo.TOKENS", 50)  # several tiles, the last of each kind a smaller one
    monkeypatch.setattr("autockpt.workload.grpo.COLUMNS", 200)
    step = build(spec())
    ids, mask = step.batch["input_ids"], step.batch["attention_mask"]
    assert mask[:, PROMPT:].all() and not mask[:, 0].all() and mask[0].all()
    scores = step.model(**step.batch)
    hidden = step.model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state[:, PROMPT - 1 : -1]
    wanted = step.model.lm_head(hidden).log_softmax(-1).gather(-1, ids[:, PROMPT:, None])[..., 0]
    torch.testing.assert_close(scores, wanted)
    weights = torch.linspace(-1, 1, scores.numel()).view_as(scores)
    found, plain = (torch.autograd.grad((s * weights).sum(), list(step.model.parameters())) for s in (scores, wanted))
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("more", [{"dtype": "bf16", "accumulate": 2}, {"lora": 4, "autocast": "bf16"}])
def test_the_ghost_run_needs_what_the_step_takes(more):
    step = build(spec(**more))
    step.cycle()
    measured = CpuDevice().measure_peak(step.cycle, step.resident_bytes()).peak_bytes
    with Tracer.from_spec(spec(**more)) as tracer:
        assert tracer.trace().peak_bytes == pytest.approx(measured, rel=1e-4)


def test_a_card_scores_completions_alone_and_in_place():
    def most(positions: int, **more) -> tuple[float, int]:
        """The largest storage of the step, in tiles of so many positions; and how often the kernel runs."""
        with Tracer.from_spec(spec(lora=4), **more) as tracer:
            graph = tracer.trace()
        largest = max(s.bytes for s in graph.storages if s.birth >= 0)
        return largest / (4 * 3 * positions * COLUMNS), sum("triton_kernel" in op.target for op in graph.ops)

    assert most(40 - PROMPT, device="cuda") == (1, 2)
    assert most(39) == (1, 0)  # what is read of TRL's copies are as wide as the vocabulary


@pytest.mark.parametrize("more", [{"stage": "0/2"}, {"model": "t5-tiny"}])
def test_other_steps_are_refused(more):
    with raises(UsageError, "grpo_prompt_len"):
        build(spec(**more))


def test_a_prompt_leaves_room_for_a_completion():
    with pytest.raises(ValidationError, match="grpo_prompt_len"):
        spec(seq_len=PROMPT)
