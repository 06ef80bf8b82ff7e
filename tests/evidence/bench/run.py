"""A bench from end to end: rows made ready one by one, timed interleaved, judged, and kept on disk all the while."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autockpt.errors import AutockptError, InfeasibleError, MeasurementError, UsageError
from autockpt.measuring import WorkerMeasurer
from autockpt.measuring.local import refuse_many_processes
from autockpt.schema import (
    CompileMode,
    Listener,
    ResolvedBudget,
    SearchOutcome,
    SearchRequest,
    Silence,
    covers,
    dump_choices,
    parse_budget,
)
from autockpt.schema.base import did_you_mean
from autockpt.tuning import run_search
from autockpt.tuning.targets.base import COMPILING, STEPS
from tests.evidence.bench.judging import lines_of, open_rows, results_of
from tests.evidence.bench.peers import OUR_OWN, PEERS, PLAIN
from tests.evidence.bench.report import BenchReport, BenchRequest, BenchRow, BudgetResult, SearchCost
from tests.evidence.bench.store import BenchDirectory
from tests.evidence.bench.view import bench_page

WORKER = "tests.evidence.bench.worker"


def run_bench(request: BenchRequest, listener: Listener | None = None) -> BenchReport:
    """Measure every peer that was asked for, and plans of ours, side by side. Continues an earlier run of the question.

    Raises UsageError for budgets or peers that cannot be, WorkloadError where plain steps do not run, MeasurementError
    where the device fails. A peer that cannot run is a row that says so. Ctrl-C: the report so far, ``interrupted``.
    """
    _check(request)
    listener = listener or Silence()
    with WorkerMeasurer(request.workload, request.device) as worker:
        listener.stage("build")
        environment = worker.environment
        question = request.question(environment)
        model, device = request.workload.model, environment.device.kind
        directory = BenchDirectory.enter(request.out, question, model=model, device=device, fresh=request.fresh)
        with directory.lock():
            directory.add_command(request.command)
            return _Bench(request, worker, directory, listener).run()


def _check(request: BenchRequest) -> None:
    refuse_many_processes()
    if not request.budgets:
        raise UsageError("no budgets were given", remedy="For example --budgets 30%,45%,60%,85%.")
    for budget in request.budgets:
        if budget.kind not in ("share", "bytes"):
            raise UsageError(
                f"a bench has no budget {budget.text!r}",
                remedy="Write shares of save-everything's measured peak (60%) or sizes (24GB).",
            )
    for name in (name for name in request.peers or () if name not in PEERS):
        remedy = f"{did_you_mean(name, PEERS)}The table has: {', '.join(PEERS)}."
        raise UsageError(f"there is no peer {name!r}", remedy=remedy)


def taking_part(asked: Sequence[str] | None) -> list[str]:
    """Names of the peers that take part, in the table's order; plain training always does."""
    wanted = asked or [name for name, peer in PEERS.items() if not peer.by_name_only]
    return [name for name in PEERS if name == PLAIN or name in wanted]


class _Bench:
    """The state of one run; what is lasting is in the directory."""

    def __init__(
        self, request: BenchRequest, worker: WorkerMeasurer, directory: BenchDirectory, listener: Listener
    ) -> None:
        self.request = request
        self.worker = worker
        self.directory = directory
        self.listener = listener
        self.rows = directory.rows()
        self.rounds = directory.rounds()
        self.budgets: list[ResolvedBudget] = []
        self.wanted = taking_part(request.peers)
        self.missing: dict[str, str] = {}
        self.deadline = float("inf")

    def run(self) -> BenchReport:
        interrupted = False
        try:
            self._make_rows()
            self._report(interrupted=False)  # what is known is on disk before the long part begins
            if self.request.timeout is not None:
                self.deadline = time.monotonic() + self.request.timeout
            self.listener.stage("interleaved rounds", self.request.rounds)
            self._rounds_of(self._incomplete)
            self.listener.stage("until decided")
            self._rounds_of(lambda: open_rows(self._results(), self.request.most_rounds))
        except KeyboardInterrupt:
            interrupted = True
        except AutockptError:
            self._report(interrupted=True)  # what was measured until then
            raise
        return self._report(interrupted)

    # --- rows

    def _make_rows(self) -> None:
        self.missing = self._call("facts", peers=self.wanted)["missing"]
        self.listener.stage("plain training")
        self._add(PLAIN, "", {"recompute": []})
        plain = self.rows[PLAIN]
        if plain.state == "failed":
            raise MeasurementError(f"plain training failed: {plain.message}", remedy="Nothing can be compared with it.")
        self._resolve(plain)
        for name in self.wanted:
            if self.missing[name]:
                self._put(BenchRow(key=name, peer=name, group=PEERS[name].group, state="missing"), self.missing[name])
            elif name in OUR_OWN:
                self._ours(name)
            elif name != PLAIN:
                self._peer(name)

    def _resolve(self, plain: BenchRow) -> None:
        kind = self.worker.environment.device.kind
        for budget in self.request.budgets:
            if budget.kind == "share" and plain.peak_bytes is None:
                raise UsageError(
                    f"saving everything does not fit, so a budget of {budget.text} of its peak is unknown",
                    remedy="Give sizes, as in --budgets 40GB,60GB.",
                )
            budget_bytes = budget.resolve(plain.peak_bytes or 0, 0, 0)
            self.budgets.append(ResolvedBudget(asked=budget.text, bytes=budget_bytes, covers=covers(kind)))

    def _peer(self, name: str) -> None:
        self.listener.stage(name)
        found = self.directory.settings(name)
        if found is None:
            answer = self._call(
                "settings",
                peer=name,
                budgets={b.asked: b.bytes for b in self.budgets},
                plain_peak=self.rows[PLAIN].peak_bytes,
            )
            if "failed" in answer:
                row = BenchRow(key=name, peer=name, group=PEERS[name].group, state="failed")
                self._put(row, answer["failed"])
                return
            found = answer["settings"]
            self.directory.add_settings(name, found)
        if all(label for label, _ in found):
            self.rows.pop(name, None)  # an earlier run found out no settings
        for label, setting in found:
            self._add(name, label, setting)

    def _ours(self, name: str) -> None:
        """A plan of ours at every budget, each found by a search with a worker of its own."""
        for budget in self.budgets:
            key, own = f"{name} {budget.asked}", OUR_OWN[name]
            if key in self.rows and self.rows[key].state == "measured":
                continue
            self.listener.stage(f"search: {key}")
            self.worker.rest()  # two models would share the device
            row = BenchRow(key=key, peer=name, group=own.group, state="failed", budget=budget.asked)
            try:
                out = self.directory.path / "searches"
                choices, cost = search_for(self.request, budget, out, self.listener, own.compile)
            except AutockptError as error:
                state = "infeasible" if isinstance(error, InfeasibleError) else "failed"
                self._put(row.model_copy(update={"state": state}), ". ".join(error.message.splitlines()))
                continue
            self._first_steps(row.model_copy(update={"setting": {"choices": choices}, "search": cost}))

    def _add(self, name: str, label: str, setting: dict[str, Any]) -> None:
        key = f"{name} {label}".strip()
        known = self.rows.get(key)
        if known is None or known.state != "measured" or known.setting != setting:
            row = BenchRow(key=key, peer=name, group=PEERS[name].group, setting=setting, state="failed")
            self._first_steps(row)

    def _first_steps(self, row: BenchRow) -> None:
        """Measure a row's peak, compare its gradients, and keep what came of it."""
        if (known := self.rows.get(row.key)) is not None and known.setting != row.setting:
            self.rounds = [{k: v for k, v in seconds.items() if k != row.key} for seconds in self.rounds]
        self.listener.stage(f"first steps: {row.key}")
        try:
            answer = self._call("prepare", peer=row.peer, setting=row.setting)
        except MeasurementError as error:  # it took the worker with it; the next call starts another
            answer = {"state": "failed", "message": " ".join(error.message.split())[:300]}
        self._put(row.model_copy(update=answer), answer.get("message", ""))

    def _put(self, row: BenchRow, message: str) -> None:
        row = row.model_copy(update={"message": message})
        if self.rows.get(row.key) != row:
            self.rows[row.key] = row
            self.directory.add_row(row)
        if message:
            self.listener.note(f"{row.key}: {message}")

    # --- rounds

    def _rounds_of(self, wanted: Callable[[], list[str]]) -> None:
        """Rounds of the rows that are ``wanted``, until none are or time is up."""
        while time.monotonic() < self.deadline and (keys := wanted()):
            self._round(keys)
            self.listener.advance()

    def _incomplete(self) -> list[str]:
        """Every row, until each has as many rounds as were asked for."""
        measured = [row.key for row in self._asked_for() if row.state == "measured"]
        have = [sum(key in seconds for seconds in self.rounds) for key in measured]
        return measured if min(have, default=self.request.rounds) < self.request.rounds else []

    def _round(self, keys: Sequence[str]) -> None:
        wired = {key: {"peer": self.rows[key].peer, "setting": self.rows[key].setting} for key in keys}
        answer = self._call("take_turns", rows=wired)
        for key, message in answer["failed"].items():
            self._put(self.rows[key].model_copy(update={"state": "failed"}), message)
        if answer["seconds"]:
            self.rounds.append(answer["seconds"])
            self.directory.add_round(answer["seconds"])

    def _call(self, function: str, **payload: Any) -> dict[str, Any]:
        return self.worker.call(f"{WORKER}:{function}", payload)

    # --- what came of it

    def _asked_for(self) -> list[BenchRow]:
        """Rows of peers that were asked for now, in the table's order."""
        order = {name: place for place, name in enumerate(self.wanted)}
        return sorted((row for row in self.rows.values() if row.peer in order), key=lambda row: order[row.peer])

    def _results(self) -> list[BudgetResult]:
        return results_of(self._asked_for(), self.rounds, self.budgets, self.request.within)

    def _report(self, interrupted: bool) -> BenchReport:
        plain = self.rows.get(PLAIN)
        report = BenchReport(
            model=self.request.workload.model,
            settings={k: v for k, v in self.worker.settings.items() if isinstance(v, (str, int, float, bool))},
            environment=self.worker.environment,
            command=shlex.join(self.request.command),
            plain_peak_bytes=plain.peak_bytes if plain else None,
            lines=tuple(lines_of(self._asked_for(), self.rounds)),
            budgets=tuple(self._results()),
            within=self.request.within,
            most_rounds=self.request.most_rounds,
            interrupted=interrupted,
            directory=self.directory.path,
            notes=(*self.request.notes, *self.worker.notes),
        )
        self.directory.write("report.json", report.model_dump_json(indent=1, exclude={"directory"}) + "\n")
        self.directory.write("table.md", bench_page(report))
        return report


def search_for(
    request: BenchRequest, budget: ResolvedBudget, out: Path, listener: Listener, compile: CompileMode | None = None
) -> tuple[dict[str, Any], SearchCost]:
    """The choices of the plan that a search finds within so many bytes, as JSON, and what finding it took.

    ``compile``: the plan is for steps that are compiled in this way. Raises InfeasibleError where nothing fits,
    KeyboardInterrupt where the search was interrupted.
    """
    outcome = run_search(
        SearchRequest(
            budget=parse_budget(f"{budget.bytes // 1000}KB"),  # the finest unit that a budget can be written in
            workload=request.workload,
            space=request.space,
            device=request.device,
            trials=request.trials,
            seed=request.seed,
            out=out,
            compile=compile,
            fresh=request.fresh,
            command=request.command,
        ),
        listener,
    )
    if outcome.interrupted:
        raise KeyboardInterrupt
    assert outcome.plan is not None  # where nothing fits the search has raised that
    return dump_choices(outcome.plan.expand_planned()), _cost(outcome)


def _cost(outcome: SearchOutcome) -> SearchCost:
    parts = {stage.name: stage.seconds for stage in outcome.stages if stage.part}
    return SearchCost(
        trials=outcome.measured_trials,
        seconds=sum(stage.seconds for stage in outcome.stages if not stage.part),
        measured_seconds=parts.get(STEPS, 0.0),
        compile_seconds=parts.get(COMPILING, 0.0),
    )
