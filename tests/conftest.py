"""What all tests share."""

import functools
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import IO, Any

# Tests run side by side: threads of theirs would only wait for each other's cores, and last bits depend on how many
# there are. Before torch and NumPy are loaded.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import pytest
import torch
from hypothesis import settings

from autockpt.measuring import client, runner
from autockpt.process import Child
from autockpt.schema import WorkloadSpec, parse_choice
from autockpt.tracing import pool, process, tracer
from autockpt.tracing.process import GhostProcess
from autockpt.tracing.traced_run import GhostRun
from tests import kept_graphs
from tests.accelerator import accelerator  # noqa: F401  a fixture
from tests.children import connected
from tests.device import ON_CUDA

if ON_CUDA:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False

# A shell that runs the tests in the background makes them ignore Ctrl-C, and with it the tests that send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Campaigns run only where they are asked for; what is neither slow nor a campaign is fast."""
    asked = "campaign" in (config.option.markexpr or "")
    campaigns = [item for item in items if item.get_closest_marker("campaign")]
    for item in items:
        if not (item.get_closest_marker("slow") or item.get_closest_marker("campaign")):
            item.add_marker("fast")
    if campaigns and not asked:
        config.hook.pytest_deselected(items=campaigns)
        items[:] = [item for item in items if not item.get_closest_marker("campaign")]


# Tests run side by side already: further ghost processes would only cost the time of starting them.
pool.WORTH = float("inf")

# Where there is an accelerator, no fork can run a backward once this process has.
FORKS = not torch.accelerator.is_available()
_fork = GhostProcess.fork


@functools.cache
def _fill_caches() -> None:
    """What the first ghost run of a process takes longer, each of its forks would take again."""
    with torch.random.fork_rng(devices=[]):
        run = GhostRun(threads=1)
        run.build(WorkloadSpec(model="llama-tiny"), torch.device("cpu"))
        run.trace({"model.layers.0": parse_choice("recompute")})


def _fork_with_full_caches(*arguments: Any) -> GhostProcess:
    _fill_caches()
    gc.collect()
    gc.freeze()
    return _fork(*arguments)


@pytest.fixture(scope="session")
def full_caches() -> None:
    """For tests whose forks trace."""
    if FORKS:
        _fill_caches()


class _ForkedChild(Child):
    """Its ``spawn`` forks this process, which has imported what a fresh one would import for three seconds.

    The real one has tests of its own, and stands behind whatever is started as a program.
    """

    @classmethod
    def spawn(cls, module: str, *descriptors: int, log: IO[bytes], environment: Mapping[str, str]) -> Child:
        def work(theirs: Connection) -> None:
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(log.fileno(), number)
                setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115  as long as it runs
            os.environ.clear()
            os.environ.update(environment)
            sys.path[:0] = os.getcwd(), *environment["PYTHONPATH"].split(os.pathsep)
            importlib.import_module(module).main(theirs.fileno(), *descriptors)

        return connected(work, leads=True)


if FORKS:
    GhostProcess.fork = _fork_with_full_caches  # type: ignore[method-assign]
    client.Child = process.Child = _ForkedChild  # type: ignore[misc]

# Where it does not propagate, pytest listens to it, and PyTorch then writes out every graph that it compiles.
logging.getLogger("torch.__trace").propagate = True

# Tests make many objects and few cycles: the collector would look through them for a twentieth of their time.
gc.set_threshold(1_000_000)


@pytest.fixture(scope="module", autouse=True)
def _what_lives_on_is_not_searched_for_garbage() -> None:
    """Half a million objects of imported libraries make each full collection take a third of a second otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _ghost_runs_are_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """For all but the tests of tracing itself."""
    with pytest.MonkeyPatch.context() as patch:
        if "tracing" not in request.path.parts:
            patch.setattr(tracer, "_start", kept_graphs.start)
            patch.setattr(tracer, "GhostPool", kept_graphs.KeptPool)
        yield


@pytest.fixture(scope="session", autouse=True)
def _runners_freeze_what_lives_on_as_well() -> None:
    """They do not where somebody has done it before, as the fixture above: for users those could not be told apart."""
    runner.Freezer.freeze = lambda self: gc.freeze()  # type: ignore[method-assign]


@pytest.fixture(scope="session", autouse=True)
def _seconds_are_measured_briefly() -> Iterator[None]:
    """As few rounds as the code takes: how exact the seconds of a search are says no test that runs one."""
    with pytest.MonkeyPatch.context() as patch:
        for seconds in ("measuring.base.SECONDS_PER_PLAN", "tuning.targets.measured.FINAL_SECONDS"):
            patch.setattr(f"autockpt.{seconds}", 0.0)
        patch.setattr("autockpt.cost.op_times.COPY_ROUNDS", 1)
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# The same examples each time: a failure then belongs to the change at hand. HYPOTHESIS_PROFILE=explore draws new ones.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))
