"""Measure autockpt's plans against other ways of saving memory: the same machine, batch and meter, interleaved steps.

    OMP_NUM_THREADS=1 python -m tests.evidence.bench --model llama-small --device cpu --budgets 45%,60%

Rules per layer, op-level sets, PyTorch's SAC ILP (needs pulp and pwlf), torch.compile's memory budget, and a searched
plan per budget. The gradients of a method are compared with plain training's first; one that cannot run is a row that
says so. All rows are timed for some rounds, then ours and the rivals that may be the fastest at a budget, until their
ratio is known to half a percent. Prints Markdown; ``--out FILE`` keeps it after every round.
"""

from __future__ import annotations

import math
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from autockpt.cli.app import PanelCommand
from autockpt.cli.guard import guarded, progress
from autockpt.cli.options import DEVICE, listed, opt, takes_workload
from autockpt.errors import AutockptError, InfeasibleError, MeasurementError, UsageError
from autockpt.interpreter import with_room
from autockpt.schema.workload import described_by
from tests.evidence.bench.peers import OUR_OWN, PEERS, PLAIN
from tests.evidence.tables import table

if TYPE_CHECKING:
    from autockpt.measuring import WorkerMeasurer
    from autockpt.measuring.statistics import Interval
    from autockpt.schema import Listener, SearchRequest, SearchSpace

WORKER = "tests.evidence.bench.worker"
WITHIN = 0.005
Rounds = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Row:
    """One method in one setting, which its peer alone understands. ``state`` "measured": its gradients are right."""

    key: str
    peer: str
    setting: Mapping[str, Any] = field(default_factory=dict)
    state: str = "failed"
    message: str = ""
    peak_bytes: int | None = None
    gradients: str = ""
    compile_seconds: float | None = None
    budget: str = ""  # of a plan that was searched for

    @property
    def group(self) -> str:
        return PEERS[self.peer].group


class Bench:
    """Rows and rounds of one workload. ``asked``: what our searches are asked, but for the budget."""

    def __init__(self, asked: SearchRequest, worker: WorkerMeasurer, listener: Listener) -> None:
        self.asked, self.worker, self.listener = asked, worker, listener
        self.rows: dict[str, Row] = {}
        self.rounds: list[dict[str, float]] = []
        self.budgets: dict[str, int] = {}

    def make_rows(self, budgets: Iterable[str], peers: Sequence[str]) -> None:
        """First steps of every method: its peak, and its gradients."""
        from autockpt.schema import parse_budget

        missing = self._call("facts", peers=[PLAIN, *peers])["missing"]
        self._add(Row(PLAIN, PLAIN, {"recompute": []}))
        plain = self.rows[PLAIN]
        if plain.state == "failed":
            raise MeasurementError(f"plain training failed: {plain.message}", remedy="Nothing compares with it.")
        for budget in map(parse_budget, budgets):
            if budget.kind not in ("share", "bytes") or (budget.kind == "share" and plain.peak_bytes is None):
                raise UsageError(f"a bench has no budget {budget.text!r}", remedy="Write sizes, as in 24GB.")
            self.budgets[budget.text] = budget.resolved(plain.peak_bytes or 0, 0, 0).bytes
        for name in (name for name in PEERS if name in peers and name != PLAIN):
            if missing[name]:
                self.rows[name] = Row(name, name, state="missing", message=missing[name])
            elif name in OUR_OWN:
                for text in self.budgets:
                    self._search(name, text)
            else:
                answer = self._call("settings", peer=name, budgets=self.budgets, plain_peak=plain.peak_bytes)
                if "failed" in answer:
                    self.rows[name] = Row(name, name, message=answer["failed"])
                for label, setting in answer.get("settings", ()):
                    self._add(Row(f"{name} {label}".strip(), name, setting))

    def _search(self, name: str, text: str) -> None:
        """A plan of ours, found by a search with a worker of its own."""
        from autockpt.schema import dump_choices, parse_budget
        from autockpt.tuning import run_search

        self.worker.release()  # two models would share the device
        row = Row(f"{name} {text}", name, budget=text)
        budget = parse_budget(f"{self.budgets[text] // 1000}KB")  # the finest unit that a budget can be written in
        update = {"budget": budget, "compile": OUR_OWN[name].compile}
        try:
            plan = run_search(self.asked.model_copy(update=update), self.listener).plan
        except AutockptError as error:
            state = "infeasible" if isinstance(error, InfeasibleError) else "failed"
            self.rows[row.key] = replace(row, state=state, message=". ".join(error.message.splitlines()))
            return
        assert plan is not None
        self._add(replace(row, setting={"choices": dump_choices(plan.expand_planned())}))

    def _add(self, row: Row) -> None:
        self.listener.stage(f"first steps: {row.key}")
        try:
            answer = self._call("prepare", peer=row.peer, setting=row.setting)
        except MeasurementError as error:  # it took the worker with it; the next call starts another
            answer = {"state": "failed", "message": " ".join(error.message.split())[:300]}
        self.rows[row.key] = replace(row, **answer)

    def take_turns(self, keys: Iterable[str]) -> None:
        """One more round of some rows."""
        rows = {key: {"peer": self.rows[key].peer, "setting": self.rows[key].setting} for key in keys}
        answer = self._call("take_turns", rows=rows)
        for key, message in answer["failed"].items():
            self.rows[key] = replace(self.rows[key], state="failed", message=message)
        if answer["seconds"]:
            self.rounds.append(answer["seconds"])

    def _call(self, function: str, **payload: Any) -> dict[str, Any]:
        return self.worker.call(f"{WORKER}:{function}", payload)


def ratio(ours: str, base: str, rounds: Rounds) -> tuple[Interval, int] | None:
    """How many times as long a row takes as another, from the rounds that have both; None where there are none."""
    from autockpt.measuring.statistics import ratio_interval

    both = [(seconds[ours], seconds[base]) for seconds in rounds if ours in seconds and base in seconds]
    return (ratio_interval([a for a, _ in both], [b for _, b in both]), len(both)) if both else None


def judge(ratio: Interval) -> str:
    """By its 95 % interval alone."""
    return "faster" if ratio.high < 1.0 else "slower" if ratio.low > 1.0 else "undecided"


def duels(bench: Bench, own: str, text: str) -> tuple[Row | None, list[tuple[str, Interval, int]]]:
    """Our plan for a budget, if its measured peak is within it, and the ratios of its time to those of all others of
    its group that fit, the fastest first."""
    fits = [r for r in bench.rows.values() if r.state == "measured" and (r.peak_bytes or 0) <= bench.budgets[text]]
    ours = next((row for row in fits if row.peer == own and row.budget == text), None)
    if ours is None:
        return None, []
    rivals = [row.key for row in fits if row.group == ours.group and row.peer not in OUR_OWN]
    found = [(key, *known) for key in rivals if (known := ratio(ours.key, key, bench.rounds)) is not None]
    return ours, sorted(found, key=lambda duel: -duel[1].value)


def open_rows(bench: Bench, most: int) -> set[str]:
    """Rows that are worth another round: ours and each rival that may be the fastest, while that is not settled."""
    wanted: set[str] = set()
    for own in OUR_OWN:
        for text in bench.budgets:
            ours, found = duels(bench, own, text)
            for place, (rival, interval, rounds) in enumerate(found):
                decides = place == 0 or judge(interval) != "faster"
                if ours is not None and decides and interval.half_width > WITHIN and rounds < most:
                    wanted |= {ours.key, rival}
    return wanted


def page(bench: Bench, notes: Iterable[str] = ()) -> str:
    """The whole bench as Markdown."""
    from autockpt.schema import format_binary, words

    environment = bench.worker.environment
    versions = ", ".join(f"{name} {value}" for name, value in environment.versions.items())
    model = bench.asked.workload.model if bench.asked.workload is not None else ""
    parts = [f"# {model}", f"    {shlex.join(bench.asked.command)}"]
    parts.append(f"{environment.device.name}; {environment.platform}; {versions}")
    parts += ["## At each budget", _at_each_budget(bench)]
    for group in ("eager", "compiled"):
        rows = [row for row in bench.rows.values() if row.group == group]
        if rows:
            cells = [_cells(bench, row, format_binary, words.seconds) for row in rows]
            parts += [f"## {group.capitalize()}", table(("method", "peak", "step", "overhead", "95 % interval"), cells)]
    gradients = Counter(row.gradients for row in bench.rows.values() if row.gradients)
    remarks = [f"gradients {what}: {words.counted(n, 'row')}" for what, n in gradients.most_common()]
    remarks += [f"{r.key}: compiled for {r.compile_seconds:.0f} s" for r in bench.rows.values() if r.compile_seconds]
    remarks += [f"{row.key}: {row.message}" for row in bench.rows.values() if row.message]
    parts += ["## Remarks", "\n".join(f"- {remark}" for remark in (*remarks, *notes))]
    return "\n\n".join(filter(None, parts)) + "\n"


def _at_each_budget(bench: Bench) -> str:
    from autockpt.schema import format_binary

    rows: list[tuple[Any, ...]] = []
    for text, size in bench.budgets.items():
        for own in OUR_OWN:
            ours, found = duels(bench, own, text)
            asked = f"{text} ({format_binary(size)})", own
            if ours is None and any(row.budget == text and row.peer == own for row in bench.rows.values()):
                rows.append((*asked, "no plan of ours fits", "", "", ""))
            rows += [(*asked, rival, interval, rounds, judge(interval)) for rival, interval, rounds in found]
    return table(("budget", "plan", "rival that fits", "our step time over its", "rounds", "ours is"), rows)


def _cells(bench: Bench, row: Row, size: Any, seconds: Any) -> Iterable[str]:
    """A row's key, peak, step time, and overhead over plain training, or over what the compiler does by itself."""
    times = [taken[row.key] for taken in bench.rounds if row.key in taken]
    yield row.key
    yield "—" if row.peak_bytes is None else size(row.peak_bytes)
    if row.state != "measured" or not times:
        yield from (row.state if row.state != "measured" else "not timed", "—", "—")
        return
    yield seconds(statistics.median(times))
    measured = [r for r in bench.rows.values() if r.state == "measured" and r.group == row.group]
    base = next((r for r in measured if r.peer == PLAIN or r.setting.get("budget") == 1.0), row)
    known = ratio(row.key, base.key, bench.rounds) if base != row else None
    if known is None:
        yield from ("—", "—")
    else:
        low, value, high = (f"{x - 1:+.1%}" if math.isfinite(x) else "unknown" for x in vars(known[0]).values())
        yield from (value, f"{low} … {high}")


@guarded
@takes_workload
def bench(
    workload: dict[str, Any],
    *,
    budgets: str = opt("--budgets A,B", "Shares of save-everything's peak, or sizes.", default="30%,45%,60%,85%"),
    peers: str | None = opt("--peers A,B", "Only these, as in 'first-k,autockpt'. Default: all there are."),
    rounds: int = opt("--rounds N", "Time every method this often, interleaved.", default=9, min=1),
    most_rounds: int = opt("--most-rounds N", "Time what decides who is ahead at most this often.", default=60, min=1),
    trials: int = opt("--trials -n N", "Plans measured by each search, at most.", default=20, min=1),
    choices: str | None = opt("--choices A,B", "What autockpt's plans may use. Default: all; on a CPU no offload."),
    device: str | None = DEVICE,
    seed: int = opt("--seed N", "For weights, batch and sampler.", default=0, min=0),
    out: Path | None = opt("--out FILE", "Keep the page there after every round."),
) -> None:
    """Measure autockpt's plans against other ways of saving memory."""
    from autockpt.measuring import WorkerMeasurer
    from autockpt.progress import listener
    from autockpt.schema import SearchRequest, parse_budget

    named = [name for name, peer in PEERS.items() if not peer.by_name_only] if peers is None else listed(peers)
    if unknown := [name for name in named if name not in PEERS]:
        raise UsageError(f"there is no peer {unknown[0]!r}", remedy=f"The table has: {', '.join(PEERS)}.")
    space, notes = _space(choices, device)
    asked = SearchRequest(
        budget=parse_budget("50%"),  # another for each search
        workload=described_by(workload | {"seed": seed}),
        space=space,
        device=device,
        trials=trials,
        seed=seed,
        command=("python", "-m", "tests.evidence.bench", *sys.argv[1:]),
    )
    with listener(progress()) as watcher, WorkerMeasurer(asked.workload, device) as worker:  # type: ignore[arg-type]
        made = Bench(asked, worker, watcher)
        made.make_rows(listed(budgets), named)
        watcher.stage("interleaved rounds", rounds)
        try:
            while True:
                measured = [row.key for row in made.rows.values() if row.state == "measured"]
                wanted = measured if len(made.rounds) < rounds else open_rows(made, most_rounds)
                if not wanted:
                    break
                made.take_turns(wanted)
                watcher.advance()
                if out is not None:
                    out.write_text(page(made, notes), encoding="utf-8")
        except KeyboardInterrupt:
            notes = (*notes, "interrupted: this is not all that was asked for")
    print(page(made, notes), flush=True)


def _space(choices: str | None, device: str | None) -> tuple[SearchSpace, tuple[str, ...]]:
    """What our searches may use. On a CPU offload would win by not being counted, so it has to be asked for."""
    from autockpt.devices import get_device
    from autockpt.schema import SearchSpace

    space = SearchSpace()
    if choices is not None or get_device(device).kind != "cpu":
        return space.restricted(listed(choices)) if choices is not None else space, ()
    without = "plans are searched without offload here: on a CPU it is not counted (--choices allows it)"
    return space.without([kind for kind in space.choices if "offload" in kind]), (without,)


def build() -> typer.Typer:
    """The program as a typer application."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=PanelCommand)(bench)
    return app


if __name__ == "__main__":
    with_room(build())
