"""The search by compiled steps, on a made-up compiler whose peaks are not monotonic in its budget."""

from collections.abc import Mapping
from typing import Any

import pytest

from autockpt.errors import ConflictError, InfeasibleError, MeasurementError, TimeLimitReached
from autockpt.schema import RECOMPUTE, SAVE, Choice, Measurement, SearchRequest, SearchSpace, Silence, parse_budget
from autockpt.schema.choices import CompileBudget
from autockpt.schema.run_directory import RunDirectory
from autockpt.tuning.clock import Clock
from autockpt.tuning.loop import Loop
from autockpt.tuning.proposers.split import SplitProposer
from autockpt.tuning.targets.compiled import Compiled
from autockpt.tuning.trials import Trials
from tests.errors import raises
from tests.samples import environment

pytestmark = pytest.mark.slow

NAMES = tuple(f"layers.{i}" for i in range(6))


class MadeUpCompiler:
    """Layers of 100 bytes and 1 second; what is not saved takes up to half a second more. A budget of 0.2 takes more
    bytes than one of 0.6, as PyTorch's may. ``says`` is what the compiler makes of a plan before it is run."""

    def __init__(self, says: Any = None) -> None:
        self.says = says or (lambda choices: None)
        self.measured: list[dict[str, Choice]] = []
        self.environment = environment(capacity_bytes=10**6)

    def costs(self, choices: Mapping[str, Choice]) -> tuple[int, float]:
        peak, seconds = 200, 0.0
        for name in NAMES:
            choice = choices.get(name, SAVE)
            share = {"save": 1.0, "selective": 0.5, "recompute": 0.0}.get(choice.kind)
            if isinstance(choice, CompileBudget):
                share = choice.fraction
            assert share is not None
            peak += round(100 * (share if share != 0.2 else 0.7))
            seconds += 1.0 + 0.5 * (1 - share) ** 2
        return peak, seconds

    def measure(self, choices: Mapping[str, Choice], **_: Any) -> Measurement:
        self.measured.append(dict(choices))
        self.says(choices)
        peak, seconds = self.costs(choices)
        return Measurement(peak_bytes=peak, step_seconds=seconds, steps=3)

    def compare(self, plans: Mapping[str, Mapping[str, Choice]], *, rounds: int = 5) -> dict[str, list[float]]:
        return {name: [self.costs(choices)[1]] * rounds for name, choices in plans.items()}


def search(compiler: MadeUpCompiler, budget: str, mode: Any = "layers", *, trials: int = 14, **more: Any) -> Any:
    clock = Clock(Silence(), more.pop("timeout", None))
    space = SearchSpace().restricted(more.pop("choices", ("recompute",)))
    request = SearchRequest(budget=parse_budget(budget), space=space, trials=trials, compile=mode)
    run = more.pop("run", None)
    tried = Trials(run, clock)
    target = Compiled(measurer=compiler, clock=clock, request=request)  # type: ignore[arg-type]
    proposer = SplitProposer(request, NAMES, target, tried, room=10**6, seeds=more.pop("seeds", {}))
    loop = Loop(proposer, target, tried)
    loop.run()
    return loop


@pytest.mark.parametrize("mode", ["layers", "model"])
def test_the_plan_fits_and_beats_every_single_budget(mode: str):
    compiler = MadeUpCompiler()
    found = search(compiler, "60%act", mode)
    assert found.best is not None and found.best.measured is not None and found.binding
    assert found.best.measured.peak_bytes <= found.budget.bytes
    single = [compiler.costs(dict.fromkeys(NAMES, CompileBudget(fraction=f / 20))) for f in range(1, 20)]
    assert found.best.measured.step_seconds <= min(s for peak, s in single if peak <= found.budget.bytes) + 1e-9
    assert all(trial.predicted is None for trial in found.trials.all)
    assert (mode == "layers") == any(trial.name == "every-2" for trial in found.trials.all)
    for tried in compiler.measured:
        fractions = {c.fraction for c in tried.values() if isinstance(c, CompileBudget)}
        assert mode == "layers" or len(fractions) <= 1


def test_selective_layers_are_tried_where_they_are_allowed():
    """Half of a layer is kept for an eighth of a second, which no budget of this compiler's baselines is near."""
    found = search(MadeUpCompiler(), "50%act", choices=("recompute", "selective"))
    tried = {choice.kind for trial in found.trials.all for choice in trial.choices.values()}
    assert "selective" in tried and any(trial.name == "selective" for trial in found.trials.all)
    assert found.best is not None and {choice.kind for choice in found.best.choices.values()} == {"selective"}


def test_with_dropout_budgets_are_given_up_and_that_is_said():
    def says(choices: Mapping[str, Choice]) -> None:
        if any(isinstance(c, CompileBudget) for c in choices.values()):
            raise ConflictError("a graph that draws random numbers, as dropout does")

    compiler = MadeUpCompiler(says)
    found = search(compiler, "60%act")
    assert found.best is not None and {c.kind for c in found.best.choices.values()} <= {"save", "recompute"}
    assert any("dropout" in note for note in found.target.notes)
    assert any(t.measured is not None and t.encoding == "proposed" for t in found.trials.all), "the search goes on"
    assert sum(any(isinstance(c, CompileBudget) for c in tried.values()) for tried in compiler.measured) == 1


def test_a_plan_the_compiler_refuses_is_one_failed_trial():
    def says(choices: Mapping[str, Choice]) -> None:
        if choices == dict.fromkeys(NAMES, RECOMPUTE):
            raise MeasurementError("the compiler failed")

    found = search(MadeUpCompiler(says), "60%")
    assert found.best is not None
    assert [t.message for t in found.trials.all if t.state == "failed"] == ["the compiler failed"]


def test_a_compiler_that_refuses_everything_is_the_answer():
    def says(choices: Mapping[str, Choice]) -> None:
        raise MeasurementError("no graph of this")

    compiler = MadeUpCompiler(says)
    with raises(MeasurementError):
        search(compiler, "60%act")
    assert len(compiler.measured) == 1


def test_what_does_not_fit_says_how_much_is_needed():
    with pytest.raises(InfeasibleError) as caught:
        search(MadeUpCompiler(), "10%")
    assert caught.value.smallest_peak == 200


def test_compiling_ends_at_the_time_limit_and_keeps_its_results():
    compiler = MadeUpCompiler()

    def says(choices: Mapping[str, Choice]) -> None:
        if len(compiler.measured) == 3:
            late[0] = 1000.0
            raise TimeLimitReached("the worker was ended")

    compiler.says, late = says, [0.0]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Clock, "elapsed", property(lambda self: late[0]))
        found = search(compiler, "60%act", timeout=100.0)
    assert len(found.trials.all) == 2 and "time limit" in found.stopped
    assert found.best is not None and found.best.feasible


@pytest.mark.parametrize(
    ("budget", "measured", "error"),
    [("60%act", 1, MeasurementError), ("90%", 1, InfeasibleError), ("60%act", 0, MeasurementError)],
)
def test_time_that_is_up_before_the_budget_is_known_is_the_reason(budget: str, measured: int, error: Any):
    compiler = MadeUpCompiler()
    elapsed = property(lambda self: 1000.0 * (len(compiler.measured) + 1 - measured))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Clock, "elapsed", elapsed)
        with pytest.raises(error) as caught:
            search(compiler, budget, timeout=100.0)
    assert len(compiler.measured) == measured
    assert error is InfeasibleError or "--timeout" in str(caught.value.remedy)


class Slow(MadeUpCompiler):
    """Takes ``compiling`` seconds for every plan before its first step, which is short; all on a clock of its own."""

    def __init__(self, compiling: float) -> None:
        super().__init__()
        self.compiling, self.now = compiling, 0.0

    def costs(self, choices: Mapping[str, Choice]) -> tuple[int, float]:
        peak, seconds = super().costs(choices)
        return peak, seconds / 10

    def measure(self, choices: Mapping[str, Choice], **more: Any) -> Measurement:
        found = super().measure(choices, **more)
        self.now += self.compiling + 5 * found.step_seconds
        return found

    def compare(self, plans: Mapping[str, Mapping[str, Choice]], *, rounds: int = 5) -> dict[str, list[float]]:
        times = super().compare(plans, rounds=rounds)
        self.now += 1.1 * 2 * sum(map(sum, times.values()))
        return times


@pytest.mark.parametrize("timeout", [150.0, 305.0, 315.0, 600.0])
@pytest.mark.parametrize("mode", ["layers", "model"])
def test_finals_take_place_where_every_plan_is_compiled(mode: str, timeout: float):
    """No plan is begun that would leave them no room; with little of it fewer plans take part."""
    compiler = Slow(compiling=20.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Clock, "elapsed", property(lambda self: compiler.now))
        found = search(compiler, "60%act", mode, timeout=timeout, trials=100)
    assert not found.target.notes or not any("no room" in note or "not compiled" in note for note in found.target.notes)
    assert compiler.now <= timeout and found.best is not None and found.best.measured is not None
    assert found.best.measured.steps >= 3


def test_a_leaner_plan_that_was_found_does_not_move_the_budget(tmp_path):
    def enter() -> RunDirectory:
        return RunDirectory.enter(tmp_path / "run", {"q": 1})

    lean = {name: CompileBudget(fraction=0.05) for name in NAMES}

    class Odd(MadeUpCompiler):
        def costs(self, choices: Mapping[str, Choice]) -> tuple[int, float]:
            peak, seconds = super().costs(choices)
            return (100 if choices == lean else peak), seconds

    first = search(Odd(), "60%act", run=enter(), seeds={"odd": lean})
    assert any(t.measured is not None and t.measured.peak_bytes == 100 for t in first.trials.all)
    assert search(Odd(), "60%act", run=enter()).budget.bytes == first.budget.bytes
