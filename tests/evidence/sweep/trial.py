"""What is tried with one architecture: built, trained plainly, trained under random plans, ghost-traced."""

import faulthandler
import os
import resource
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from autockpt.errors import AutockptError, ConflictError, GhostError
from autockpt.runtime import attach, without_kv_cache
from autockpt.schema.choices import Choice
from autockpt.tracing import Tracer
from autockpt.tracing.traced_run import GhostRun
from autockpt.workload import Step
from autockpt.workload.failures import summary
from autockpt.workload.losses import takes_use_cache
from autockpt.workload.units import discover_units
from tests.evidence.sweep.batches import attempts, loss_of
from tests.evidence.sweep.configs import Architecture, small_config
from tests.evidence.sweep.plans import random_plan
from tests.evidence.sweep.training import Record, differences, health, seed_all, train

MOST_PARAMETERS = 5_000_000
PLANS = 3
# Private memory that can be written. An address-space limit would count what ghost runs reserve and never touch.
BYTES = 3 * 2**30


@dataclass
class Result:
    """One row of the table. ``equal`` of ``plans`` random plans trained bit for bit as without; ``failures`` says why
    others did not, ``refused`` counts those among them that were refused by name."""

    name: str
    cls: str
    units: int = 0
    traced: str = "–"
    trained: bool = False
    plans: int = 0
    equal: int = 0
    refused: int = 0
    seconds: float = 0.0
    remarks: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def try_out(architecture: Architecture, seed: int, say: Any = lambda result: None) -> Result:
    """Try everything; ``say`` is told of intermediate results, for the case that the process dies."""
    result = Result(architecture.name, architecture.cls)
    begin = time.perf_counter()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        _try_out(architecture, seed, result, say)
    except _Stop as stop:
        result.remarks.insert(0, str(stop))
    result.seconds = time.perf_counter() - begin
    return result


def in_a_fork(architecture: Architecture, say: Any, *, seed: int) -> None:
    """The same with limits on memory."""
    os.dup2(1, 2)
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    say(try_out(architecture, seed, say))


def warm_up() -> None:
    """Import and run once, in this process, what every child would otherwise load for itself."""
    try_out(Architecture("gpt2", "GPT2LMHeadModel", "CAUSAL_LM"), 0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    run = GhostRun(writable=True)  # the tracer's own happens in a process of its own
    run.copy(
        Step(model, torch.ones(2, 4), loss=lambda m, x: m(x).sum(), optimizer=torch.optim.AdamW(model.parameters()))
    )
    run.trace({})


class _Stop(Exception):
    pass


def _try_out(architecture: Architecture, seed: int, result: Result, say: Any) -> None:
    model = _build(architecture)
    batch, plain = _plain(model, architecture, result)
    result.trained = True
    if problem := health(plain):
        result.remarks.append(problem)
    deterministic = False
    if differences(plain, train(model, batch, without_kv_cache)):
        deterministic = True
        result.remarks.append("plain training varies by itself; compared under deterministic algorithms")
        plain = train(model, batch, without_kv_cache, deterministic=True)
        if varying := differences(plain, train(model, batch, without_kv_cache, deterministic=True)):
            raise _Stop(f"plain training does not repeat itself ({varying[0]})")
    units = discover_units(model)
    result.units = len([u for u in units if u.role == "block"])
    say(result)
    plans = [random_plan(model, units, seed * 1000 + i) for i in range(PLANS)] if units else []
    for i, plan in enumerate(plans):
        _compare(model, batch, plain, plan, i, deterministic, result)
        say(result)
    _trace(model, batch, plans, result)


def _build(architecture: Architecture) -> nn.Module:
    size = 0
    try:
        config = small_config(architecture.name)
    except Exception as error:
        raise _Stop(f"no small config: {summary(error)}") from None
    with suppress(Exception), torch.device("meta"):  # not every class can be built without memory
        size = _parameters(getattr(transformers, architecture.cls)(config))
    _check(size)
    try:
        seed_all()
        model = getattr(transformers, architecture.cls)(small_config(architecture.name)).float().train()
    except Exception as error:
        raise _Stop(f"not built: {summary(error)}") from None
    _check(_parameters(model))
    return model


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _check(size: int) -> None:
    if size > MOST_PARAMETERS:
        raise _Stop(f"too large with the rules for small configs: {size / 1e6:.1f} M parameters")


def _plain(model: nn.Module, architecture: Architecture, result: Result) -> tuple[dict[str, Any], Record]:
    first: Exception | None = None
    for attempt in attempts(model, architecture.task):
        try:
            record = train(model, attempt.batch, without_kv_cache)
        except Exception as error:
            first = first or error
            continue
        if attempt.remark:
            why = f" ({summary(first)})" if first is not None and " for " not in attempt.remark else ""
            result.remarks.append(attempt.remark + why)
        return attempt.batch, record
    raise _Stop(f"does not train plainly: {summary(first) if first else ''}")


def _compare(
    model: nn.Module,
    batch: dict[str, Any],
    plain: Record,
    plan: dict[str, Choice],
    number: int,
    deterministic: bool,
    result: Result,
) -> None:
    result.plans += 1
    try:
        planned = train(model, batch, partial(attach, choices=plan), deterministic=deterministic)
    except ConflictError as error:
        result.refused += 1
        result.failures.append(f"plan {number} refused: {error.message}")
        return
    except Exception as error:
        result.failures.append(f"plan {number} failed: {summary(error)} [{_in_words(plan)}]")
        return
    if different := differences(plain, planned):
        what = f"{len(different)} of {len(plain)} values: {', '.join(different[:3])}"
        result.failures.append(f"plan {number} UNEQUAL: {what} [{_in_words(plan)}]")
    else:
        result.equal += 1


def _trace(model: nn.Module, batch: dict[str, Any], plans: list[dict[str, Choice]], result: Result) -> None:
    """Ghost-run the plain cycle and the cycle under every plan that trained."""
    step = partial(loss_of, use_cache=False) if takes_use_cache(model) else loss_of
    workload = Step(model, batch, loss=step, optimizer=torch.optim.AdamW(model.parameters()))
    result.traced = "no"
    for fallback in (False, True):
        try:
            with Tracer.from_step(workload, fallback=fallback) as tracer:
                result.traced = "recorded" if tracer.trace().source == "recorded" else "yes"
                for i, plan in enumerate(() if fallback else plans):
                    _trace_plan(tracer, plan, i, result)
            return
        except AutockptError as error:
            result.remarks.append(f"{'recorded' if fallback else 'ghost'} run: {error.message}")


def _trace_plan(tracer: Tracer, plan: dict[str, Choice], number: int, result: Result) -> None:
    called = {unit.name for unit in tracer.units}
    refused = any(f"plan {number} refused" in failure for failure in result.failures)
    try:
        tracer.trace({name: choice for name, choice in plan.items() if name in called})
    except AutockptError as error:
        if isinstance(error, GhostError) or not refused:
            result.remarks.append(f"ghost run of plan {number}: {error.message}")


def _in_words(plan: dict[str, Choice]) -> str:
    return ", ".join(f"{name} {choice}" for name, choice in plan.items() if choice.kind != "save")
