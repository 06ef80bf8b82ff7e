"""Plans that are ghost-run ahead are what they would be when asked for."""

import os
import signal
from collections.abc import Iterator

import pytest

from autockpt.errors import AutockptError
from autockpt.schema import Choice, WorkloadSpec, parse_choice
from autockpt.tracing import Tracer, pool
from autockpt.tracing.process import can_fork
from tests.tracing.reference import uniform
from tests.tuning.small import TWO_LAYERS

pytestmark = pytest.mark.skipif(not can_fork(), reason="further processes are forked")
SPEC = WorkloadSpec(model=TWO_LAYERS, batch_size=2, seq_len=32, optimizer="none")
KINDS = ("save", "recompute", "selective", "remake", "offload")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Tracer, Tracer]]:
    """One that has further processes, and one that asks its own for plan after plan."""
    monkeypatch.setattr(pool, "WORTH", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    with Tracer.from_spec(SPEC) as several, Tracer.from_spec(SPEC) as alone:
        yield several, alone


def plans(tracer: Tracer) -> list[dict[str, Choice]]:
    return [uniform(kind, tracer.units) for kind in KINDS]


def processes(tracer: Tracer) -> list[int]:
    return [process.child.pid for process in tracer._backend._processes]


@pytest.mark.slow
def test_graphs_do_not_depend_on_process_or_order(pair) -> None:
    several, alone = pair
    wanted = plans(several)
    several.ahead(wanted)
    assert len(processes(several)) == 3
    for plan in (wanted[3], {}, *wanted):
        assert several.trace(plan) == alone.trace(plan)
    several.ahead(wanted)
    several.ahead(wanted[:1])  # the others are given up
    assert several.trace(wanted[4]) == alone.trace(wanted[4])


@pytest.mark.slow
def test_what_a_plan_raises_is_raised_when_it_is_asked_for(pair) -> None:
    several, _ = pair
    wrong = {"no.such": parse_choice("recompute")}
    several.ahead([wrong, *plans(several)])
    assert several.trace(plans(several)[1]).ops
    with pytest.raises(AutockptError):
        several.trace(wrong)


@pytest.mark.slow
def test_a_further_process_that_dies_is_done_without(pair) -> None:
    several, alone = pair
    several.ahead(plans(several))
    first, *others = processes(several)
    for other in others:
        os.kill(other, signal.SIGKILL)
    for plan in plans(several):
        assert several.trace(plan) == alone.trace(plan)
    assert processes(several) == [first]
    os.kill(first, signal.SIGKILL)
    with pytest.raises(AutockptError):
        several.trace({})
