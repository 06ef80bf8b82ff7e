from pathlib import Path

import pytest

from autockpt.schema import (
    DeviceInfo,
    Environment,
    FinishedSearch,
    ResolvedBudget,
    SearchOutcome,
    SearchRequest,
    SearchSpace,
    WorkloadSpec,
    parse_budget,
)
from autockpt.schema.request import question_hash

ENVIRONMENT = Environment(
    device=DeviceInfo(kind="cpu", name="a processor", capacity_bytes=2**34, threads=2),
    versions={"torch": "2.13.0", "optuna": "5.0.0", "autockpt": "0.1.0"},
)


def request(**changes: object) -> SearchRequest:
    asked = {"budget": parse_budget("60%"), "workload": WorkloadSpec(model="llama-tiny"), "space": SearchSpace()}
    return SearchRequest.model_validate(asked | changes)


def digest(asked: SearchRequest, environment: Environment = ENVIRONMENT, **more: object) -> str:
    return question_hash(asked.question(environment, **more))


def test_how_long_and_where_is_not_the_question() -> None:
    same = request(trials=7, timeout=3.0, out=Path("elsewhere"), fresh=True, notes=("x",), command=("a",))
    assert digest(request()) == digest(same)
    versions = ENVIRONMENT.versions | {"optuna": "6"}
    assert digest(request()) == digest(request(), ENVIRONMENT.model_copy(update={"versions": versions}))


@pytest.mark.parametrize(
    ("now", "answered"), [((600, 100), True), ((600, 50), True), ((600, 200), False), ((600, None), False)]
)
def test_a_longer_training_searches_on_where_time_ran_out(now: tuple[float, int | None], answered: bool) -> None:
    budget = ResolvedBudget(asked="60%", bytes=60)
    outcome = SearchOutcome(plan=None, budget=budget, device=ENVIRONMENT.device, stopped="the time limit was reached")
    finished = FinishedSearch(trials=40, timeout=600, training_steps=100, outcome=outcome)
    assert finished.answers(request(timeout=now[0], training_steps=now[1])) == answered
    ended = finished.model_copy(update={"outcome": outcome.model_copy(update={"stopped": "nothing is left"})})
    assert ended.answers(request(timeout=now[0], training_steps=now[1]))


def test_what_changes_the_answer_is() -> None:
    others = [
        request(budget=parse_budget("61%")),
        request(workload=WorkloadSpec(model="llama-tiny", accumulate=2)),
        request(space=SearchSpace().restricted(("recompute",))),
        request(seed=1),
    ]
    versions = ENVIRONMENT.versions | {"torch": "2.14.0"}
    digests = [digest(r) for r in others]
    digests.append(digest(request(), ENVIRONMENT.model_copy(update={"versions": versions})))
    digests.append(digest(request(), model_fingerprint="abc"))
    assert len({digest(request()), *digests}) == 1 + len(digests)
