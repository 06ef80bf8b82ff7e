"""The Python interface: ``search``, ``estimate``, ``explain`` and ``verify`` mirror the commands; ``trace`` is Python's
alone.

A model is named as there (``llama-8b``, a folder, a class), its workload given as keyword arguments by the names of
the command line's options: ``batch_size``, ``seq_len``, ``lora``, …. ``search`` also takes a live ``Step``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from autockpt.analysis.explain import explain as explained
from autockpt.analysis.explanation import Explanation
from autockpt.analysis.page import page_of
from autockpt.analysis.verify import verify
from autockpt.errors import UsageError
from autockpt.progress import listener
from autockpt.schema import Budget, Estimate, Listener, Plan, Silence
from autockpt.schema.plan import CompileMode
from autockpt.schema.request import TRIALS, BatchAnswer, PipelineAnswer
from autockpt.schema.workload import described_by
from autockpt.terminal import console
from autockpt.tracing import trace
from autockpt.tuning import answer, search_request
from autockpt.tuning import estimate as estimated
from autockpt.tuning.entry import refuse_described
from autockpt.tuning.estimates import estimate_step
from autockpt.workload import Step

__all__ = ["estimate", "explain", "search", "trace", "verify"]


def search(
    step: Step | str,
    *,
    budget: str | Budget = "auto",
    hardware: str | None = None,
    device: str | None = None,
    compile: CompileMode | None = None,
    global_batch: int | None = None,
    lengths: Any = None,
    headroom: str | None = None,
    host_budget: str | int | None = None,
    allow_inexact: bool = False,
    choices: Sequence[str] | None = None,
    trials: int = TRIALS,
    timeout: float | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    fresh: bool = False,
    progress: bool = True,
    **workload: Any,
) -> Plan:
    """The fastest plan that fits a budget, for a live training step or for a model by its name.

    ``step`` is an ``autockpt.Step``, searched in this process on its own device, or the name of a model, which another
    process builds and measures with ``workload`` (``batch_size=8, seq_len=2048, lora=16``; ``seq_len="auto"``: the
    longest sequences that fit). ``hardware`` ("rtx4090", or a file) simulates a device that need not be here,
    ``device`` and ``compile`` are those of the command line; all of these need a model's name.

    ``global_batch`` are the rows of an optimizer update: batch size and accumulation are then found, too, and are in
    the plan's ``settings`` (``batch_size``, ``accumulate``). A live step's batch is cut to fewer rows, or its rows are
    repeated.

    ``lengths`` are those of the sequences that training will see: a data set, a ``DataLoader`` (whose padded batches
    are counted), counts by length, a length per row, or text as for ``--lengths``. The plan then has sets of choices by
    the size of the batch. A live step's batch must be as long as the longest; it is cut for the others.

    ``budget`` is text such as "24GB", "60%", "60%act" or "auto" (all there is), ``headroom`` ("2%", "500MB") is left
    free of it (by default 5% of bytes or "auto" of simulated ``hardware``, else nothing), ``host_budget`` ("8GB", or
    bytes) bounds what offloading may claim of host memory. With ``allow_inexact`` output head and loss, MLPs and
    norms may run on some tokens at a time: gradients are then equal up to rounding. ``choices`` are the only ones that
    layers and output head may make (``["recompute", "offload"]``; under FSDP2 ``"gathered"`` is one).
    ``timeout`` is in seconds, ``out`` the folder that keeps the run and its page (None: nothing is kept). A search that
    came to its end there is answered from its record; ``fresh`` sets that aside. ``progress`` is a bar on a terminal's
    standard error, lines elsewhere.

    A live model's weights, optimizer, gradients and random state are the caller's again afterwards, bit for bit.
    Raises UsageError for what does not go together, WorkloadError for a step that does not run, InfeasibleError where
    nothing fits, KeyboardInterrupt where Ctrl-C came before anything fitting was found.
    """
    with ExitStack() as stack:
        screen = console(stderr=True)
        watcher: Listener = stack.enter_context(listener(screen)) if progress else Silence()
        open_length = isinstance(step, str) and workload.get("seq_len") == "auto"
        given = {name: value for name, value in workload.items() if not (open_length and name == "seq_len")}
        described = {"hardware": hardware, "device": device, "compile": compile}
        if not isinstance(step, str):
            refuse_described(step, {**described, **workload})
        request = search_request(
            budget=budget,
            workload=described_by({"seed": seed, **given, "model": step}) if isinstance(step, str) else None,
            step=None if isinstance(step, str) else step,
            hardware=hardware,
            device=device,
            compile=compile,
            global_batch=global_batch,
            lengths=lengths,
            longest=open_length,
            headroom=headroom,
            host_budget=host_budget,
            allow_inexact=allow_inexact,
            choices=choices,
            trials=trials,
            timeout=timeout,
            seed=seed,
            out=out,
            fresh=fresh,
        )
        if request.all_stages:
            raise UsageError("each stage of a pipeline has a plan of its own", remedy='Name one: stage="0/4".')
        found = answer(request, watcher)
        assert not isinstance(found, PipelineAnswer)
        if isinstance(found, BatchAnswer):
            if progress:
                from autockpt.cli.search import batches_table

                screen.print(batches_table(found))
            for note in found.notes:
                watcher.note(note)
            found = found.outcome
        if found.run_directory is not None:
            watcher.note(page_of(found.run_directory))
    if found.plan is None:
        raise KeyboardInterrupt
    return found.plan


def estimate(
    models: str | Sequence[str] | Step,
    *,
    batch_sizes: Sequence[int] | None = None,
    seq_lens: Sequence[int] | None = None,
    **described: Any,
) -> Iterator[Estimate]:
    """Does it fit, with what plan, how fast: one answer for each size, as soon as it is known. No step is measured.

    Of models by their names all is simulated, for ``cards`` that are described: see
    ``autockpt.tuning.estimates.estimate`` for these options, ``described``; sizes are 1 × 2048 where none are given. A
    live ``Step`` is asked on the device of its model, its batch cut or repeated; sizes are its own where none are
    given. Bytes and seconds. Raises UsageError for options of described models with a live step.
    """
    if isinstance(models, Step):
        refuse_described(models, described)
        return estimate_step(models, batch_sizes, seq_lens)
    sizes = {"batch_sizes": batch_sizes, "seq_lens": seq_lens}
    given = {name: value for name, value in sizes.items() if value is not None}
    return estimated(models, **given, **described)


def explain(
    plan: Plan | str | Path | None = None,
    *,
    model: str | None = None,
    step: Step | None = None,
    budget: str | Budget | None = None,
    hardware: str | None = None,
    device: str | None = None,
    show: bool = True,
    **workload: Any,
) -> Explanation:
    """Where a step's bytes go, why a plan does what it does, and what other plans would cost. No step is measured.

    ``plan`` is a plan, its file, or a run's directory; without one, what fits ``budget`` is explained for ``model``, or
    plain training. What ``model`` and ``workload`` do not say is as in the plan. ``step`` is explained in place of a
    named model: a live step, of which only ghost runs are made. ``show`` prints it as the command line does. Bytes and
    seconds in what is returned.
    """
    given = workload if model is None else {**workload, "model": model}
    explanation = explained(plan, given, step=step, budget=budget, device=device, hardware=hardware)
    if show:
        from autockpt.cli.explain import print_explanation

        print_explanation(explanation, console(stderr=False))
    return explanation
