"""A run of a model with two layers, as a search leaves it behind."""

from pathlib import Path

from autockpt.schema import (
    RECOMPUTE,
    SAVE,
    Choice,
    Comparison,
    DeviceInfo,
    Environment,
    FinishedSearch,
    Measurement,
    Menu,
    OpTimes,
    Plan,
    Prediction,
    Profile,
    ResolvedBudget,
    SearchOutcome,
    Trial,
    Unit,
    plan_hash,
)
from autockpt.schema.profile import MenuItem
from autockpt.schema.run_directory import RunDirectory, directory_name
from tests.samples import MATMUL, small_graph

DEVICE = DeviceInfo(kind="cpu", name="a processor", capacity_bytes=2**34)
ENVIRONMENT = Environment(device=DEVICE, versions={"torch": "2.13.0"}, platform="Linux")
BUDGET = ResolvedBudget(asked="60%act", bytes=1900, covers="everything")


def plan_of(first: Choice, second: Choice) -> dict[str, Choice]:
    return {"h.0": first, "h.1": second}


def tried(number: int, name: str, choices: dict[str, Choice], peak: int, seconds: float, **more: object) -> Trial:
    """A measured trial; judged by the budget of this run."""
    fits = peak <= BUDGET.bytes
    data: dict[str, object] = {
        "number": number,
        "name": name,
        "encoding": "baseline",
        "choices": choices,
        "plan_hash": plan_hash(choices),
        "state": "measured" if fits else "over_budget",
        "feasible": fits,
        "predicted": Prediction(peak_bytes=peak - 3, step_seconds=seconds * 1.1),
        "measured": Measurement(peak_bytes=peak, step_seconds=seconds, noise=0.02, steps=5),
        "elapsed_seconds": 10.0 + number,
    }
    return Trial.model_validate(data | more)


def item(choice: Choice, kept: int, again: float) -> MenuItem:
    """What a choice keeps, and the seconds that it adds."""
    seconds = {"forward_seconds": 0.02, "backward_seconds": 0.04, "recompute_seconds": again}
    peaks = {"forward_peak_bytes": 500, "backward_peak_bytes": 500}
    return MenuItem.model_validate({"choice": choice, "kept_bytes": kept} | seconds | peaks)


def profile() -> Profile:
    items = item(SAVE, 140, 0.0), item(RECOMPUTE, 10, 0.02)
    times = OpTimes(environment=ENVIRONMENT, seconds={MATMUL: 0.01}, optimizer_seconds=0.02)
    return Profile(
        op_times=times,
        menus=(Menu(kind=0, representative="h.0", items=items),),
        save_all_peak_bytes=2200,
        save_all_seconds=0.14,
    )


def trials(model: str = "small") -> list[Trial]:
    def knobs(price: float) -> dict[str, object]:
        return {"encoding": "knobs", "parameters": {"margin": 0.0, "recompute_price": price}}

    message = "it raised <i>ValueError</i> in /home/somebody/secret/train.py"
    failed = {"state": "failed", "feasible": False, "measured": None, "message": message}
    return [
        tried(0, "none", plan_of(SAVE, SAVE), 2200, 0.14),
        tried(1, "recompute all", plan_of(RECOMPUTE, RECOMPUTE), 1700, 0.18),
        tried(2, f"knobs {model}", plan_of(RECOMPUTE, SAVE), 1850, 0.16, **knobs(1.0)),
        tried(3, "knobs #2", plan_of(SAVE, RECOMPUTE), 0, 0.1, **knobs(2.0), **failed),
    ]


def make_run(root: Path, *, model: str = "small", budget: str = "60%act", answered: bool = True) -> RunDirectory:
    """A run that has come to its end; with ``answered`` False one that was stopped before."""
    question = {"model": model, "budget": budget}
    run = RunDirectory.enter(root / directory_name("small", "cpu", budget, question), question)
    for trial in trials(model):
        run.add_trial(trial)
    run.write_environment(ENVIRONMENT)
    run.write_profile(profile())
    run.write_graph(small_graph())
    model_file = "/home/somebody/secret/config.json"
    run.add_command(("autockpt", "search", "--model", model_file, "--budget", budget))
    if not answered:
        return run
    run.write_graph(small_graph(), "recompute")
    run.write_graph(small_graph(), "plan")
    none, everything, ours, _ = trials(model)
    rows = tuple(
        Comparison(
            name=name,
            verdict="fits" if trial.feasible else "over_budget",
            predicted=trial.predicted,
            measured=trial.measured,
            plan_hash=trial.plan_hash,
        )
        for name, trial in (("none", none), ("recompute all", everything), ("ours", ours))
    )
    plan = Plan.create(
        ours.choices,
        [Unit(name=name, cls="Block", kind=0) for name in ours.choices],
        model=model,
        source="measured",
        settings={"batch_size": 4, "seq_len": 64},
        environment=ENVIRONMENT,
        budget=BUDGET,
        predicted=ours.predicted,
        measured=ours.measured,
        baselines=rows[:-1],
    )
    run.write_plan(plan)
    outcome = SearchOutcome(
        plan=plan,
        budget=BUDGET,
        device=DEVICE,
        rows=rows,
        settings=plan.settings,
        measured_trials=3,
        stopped="as many candidates were tried as --trials allows (2)",
        run_directory=run.path,
        plan_path=run.plan_path,
        seconds=2.0,
        notes=("a note about /home/somebody/secret",),
    )
    run.write_finished(FinishedSearch(trials=2, outcome=outcome))
    return run
