"""What a bench does in the model's process, called by reference: peers' settings, first steps, interleaved rounds."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

from torch import nn

from autockpt.errors import AutockptError, DeviceOutOfMemory
from autockpt.measuring import StepRunner
from autockpt.measuring.failures import device_lost
from autockpt.runtime import without_kv_cache
from autockpt.schema import Unit
from autockpt.verification import Observation, Reference, deterministically, digest, judge, observe_reference
from autockpt.workload import discover_units, nested_tensors
from autockpt.workload.failures import summary
from tests.evidence.bench.peers import PEERS, Context, Detach
from tests.evidence.bench.peers.compiled import compile_seconds

UNTIMED_CYCLES = 2
"""Of a peer that was attached, ours too: what it learns from its first calls, and checks, is not timed."""


class PeerRunner(StepRunner):
    """Runs steps of a workload with what a peer attaches, instead of a plan of ours."""

    @contextmanager
    def attached(self, plan: Any, *, what: str = "this plan") -> Iterator[Any]:
        with self.prepared(what) as stack:
            stack.callback(plan(self.workload.model))
            yield SimpleNamespace(host_bytes=0)

    def _untimed_cycles(self, plan: Any) -> int:
        return UNTIMED_CYCLES


@lru_cache(maxsize=1)
def _peers(runner: StepRunner) -> PeerRunner:
    return PeerRunner(runner.workload, runner.device, beat=runner.beat)


def facts(runner: StepRunner, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Why each peer of ``payload["peers"]`` cannot run here, empty where nothing is known."""
    return {"missing": {name: PEERS[name].missing(runner.device.kind) for name in payload["peers"]}}


def settings(runner: StepRunner, payload: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of one peer, or why there are none: ``{"settings": [[label, data], …]}`` or ``{"failed": …}``."""
    context = Context(
        workload=runner.workload, units=_blocks(runner), budgets=payload["budgets"], plain_peak=payload["plain_peak"]
    )
    try:
        found = []
        for setting in PEERS[payload["peer"]].settings(context):
            found.append([setting.label, setting.data])
            runner.beat("setting")
        return {"settings": found}
    except Exception as error:  # another project's code, run as it is
        return {"failed": _reason(error)}
    finally:
        runner.workload.release_gradients()


def prepare(runner: StepRunner, payload: Mapping[str, Any]) -> dict[str, Any]:
    """A row's first steps: peak, and gradients against plain training's.

    ``state`` is "measured" only where the gradients are what the peer promises.
    """
    compiling = compile_seconds(runner.workload.model)
    try:
        measured = _peers(runner).measure(_attached(runner, payload), steps=1)
        compiling = compile_seconds(runner.workload.model) - compiling
        equal, words = _gradients(runner, payload)
    except DeviceOutOfMemory as error:
        return {"state": "out_of_memory", "message": _one_line(error)}
    except Exception as error:  # another project's code, run as it is
        return {"state": "failed", "message": _reason(error)}
    if not equal:
        return {"state": "failed", "message": f"wrong gradients: {words}", "peak_bytes": measured.peak_bytes}
    return {
        "state": "measured",
        "peak_bytes": measured.peak_bytes,
        "gradients": words,
        "compile_seconds": compiling or None,
    }


def take_turns(runner: StepRunner, payload: Mapping[str, Any]) -> dict[str, Any]:
    """One round: seconds by key of ``payload["rows"]``, interleaved.

    A row that fails now is named in ``failed`` with the reason, and the others' round is lost with it.
    """
    rows: dict[str, Callable[[nn.Module], Detach]] = {}
    failed: dict[str, str] = {}
    for key, row in payload["rows"].items():
        rows[key] = _noting(key, _attached(runner, row), failed)
    try:
        times = _peers(runner).compare(rows, rounds=1)
    except Exception as error:
        if not failed:
            raise
        key = list(failed)[-1]
        return {"seconds": {}, "failed": {key: _reason(error)}}
    return {"seconds": {key: values[0] for key, values in times.items()}, "failed": {}}


def _noting(key: str, attach: Callable[[nn.Module], Detach], running: dict[str, str]) -> Callable[[nn.Module], Detach]:
    """``attach`` with a note of which row is running, for the case that it fails."""

    def run(model: nn.Module) -> Detach:
        running.pop(key, None)
        running[key] = ""
        return attach(model)

    return run


def _attached(runner: StepRunner, payload: Mapping[str, Any]) -> Callable[[nn.Module], Detach]:
    peer, units = PEERS[payload["peer"]], [unit.name for unit in _blocks(runner)]
    return lambda model: peer.attach(model, units, payload["setting"])


def _blocks(runner: StepRunner) -> list[Unit]:
    return [unit for unit in discover_units(runner.workload.model, runner.workload.units) if unit.role == "block"]


def _gradients(runner: StepRunner, payload: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether two steps are those of plain training, and what the comparison says."""
    peer = PEERS[payload["peer"]]
    reference = _reference(runner, not peer.exact, _state(runner))
    if reference is None:
        return True, "not compared: plain training does not fit"
    if not peer.exact and reference.first.draws:
        return True, "not compared: the model draws random numbers, which compiled code draws its own way"
    compiled = peer.group == "compiled"
    attached, sketched = _attached(runner, payload), not peer.exact
    observed = _observe(runner, attached, reference.deterministic, sketched, typed=not compiled)
    if compiled:
        observed = observed.model_copy(update={"coarsest": reference.first.coarsest})
    check = judge(reference, observed)
    return check.equal, "bit-equal" if check.equal and peer.exact and check.repeatable else check.describe()


def _state(runner: StepRunner) -> tuple[str, ...]:
    """Fingerprints of all tensors that the gradients of a step depend on."""
    step = runner.workload
    return tuple(map(digest, nested_tensors(step.model, step.scaler, step.batch, *step.snapshot)))


@lru_cache(maxsize=2)  # a process has one runner: with sketches and without
def _reference(runner: StepRunner, sketched: bool, state: tuple[str, ...]) -> Reference | None:
    """Plain training from this state; None where that does not fit.

    Timed steps change the state (running statistics, a scaler's scale). The reference is then observed again, so that
    it starts where the candidate starts: an observation restores what it changed.
    """

    def plain(model: nn.Module) -> Detach:
        return without_kv_cache(model).remove

    try:
        return observe_reference(lambda deterministic: _observe(runner, plain, deterministic, sketched))
    except DeviceOutOfMemory:
        return None


def _observe(
    runner: StepRunner,
    attach: Callable[[nn.Module], Detach],
    deterministic: bool,
    sketched: bool,
    *,
    typed: bool = True,
) -> Observation:
    """Two accumulating steps with something attached."""
    seen = partial(_peers(runner).observed, sketched=sketched, typed=typed)
    with _peers(runner).attached(attach):
        observed = deterministically(seen) if deterministic else seen()
    runner.beat("observed")
    return observed


def _reason(error: Exception) -> str:
    """Why something failed, in one line. A device that is lost is no row's failure: that error is passed on."""
    if device_lost(error):
        raise error
    return _one_line(error)


def _one_line(error: BaseException) -> str:
    said = error.message if isinstance(error, AutockptError) else summary(error)
    return " ".join(said.split())[:300]
