"""Where every search begins: parse what a user asked for into one request, and answer it.

The command line, ``autockpt.search``, the Trainer's callback and ``import autockpt.auto`` all call ``search_request``
and ``answer``. What follows is in ``search.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from autockpt.errors import RanksError, UsageError
from autockpt.measuring.local import ranks_here
from autockpt.measuring.ranks import share_of
from autockpt.process import launched
from autockpt.schema import (
    Budget,
    Hardware,
    Listener,
    SearchOutcome,
    SearchRequest,
    SearchSpace,
    Silence,
    WorkloadSpec,
    parse_budget,
    parse_size,
)
from autockpt.schema.base import first_violation, short
from autockpt.schema.request import BatchAnswer, PipelineAnswer
from autockpt.shipped import load_hardware
from autockpt.tuning.batch_sizes import search_batch_sizes
from autockpt.tuning.job_sizes import with_longest
from autockpt.tuning.pipeline import search_stages
from autockpt.tuning.search import refuse_unwritable, run_search
from autockpt.tuning.sequence_lengths import search_lengths
from autockpt.workload import Step
from autockpt.workload.lengths import lengths_of


def answer(request: SearchRequest, listener: Listener | None = None) -> SearchOutcome | BatchAnswer | PipelineAnswer:
    """Search for one plan, or as the request asks: for a plan and its micro-batch, for sets of choices by length, for
    the longest sequences, or for a plan for each stage of a pipeline.
    """
    listener = listener or Silence()
    on_ranks = request.workload is not None and request.hardware is None and launched() > 1
    if on_ranks or (request.step is not None and not request.others_wait and ranks_here() > 1):
        _refuse_on_ranks(request)
    else:
        refuse_unwritable(request)
    if request.all_stages:
        return search_stages(request, listener)
    if on_ranks:
        step = share_of(request.described, request.device)
        request = request.model_copy(update={"workload": None, "step": step})
    if request.longest:
        request = with_longest(request, listener)
    if request.rows_per_update is not None:
        return search_batch_sizes(request, listener)
    if request.lengths is not None:
        return search_lengths(request, listener)
    return run_search(request, listener)


def _refuse_on_ranks(request: SearchRequest) -> None:
    """Raises RanksError for what the ranks of one job cannot search together."""
    asked = {
        "a global batch": request.rows_per_update,
        "lengths": request.lengths or request.longest or None,
        "compiling": request.compile,
        "all stages of a pipeline": request.all_stages or None,
    }
    if named := [name for name, value in asked.items() if value is not None]:
        raise RanksError(
            f"{named[0]} cannot be asked for by {max(launched(), ranks_here())} processes that train together",
            remedy="Search on one device, without torchrun; or leave it out.",
        )


def of_host_with(hardware: Hardware, gpus: int) -> Hardware:
    """The hardware with its share of the host's link, where so many ``gpus`` of the host train at the same time.

    Raises UsageError where the description does not say what they share.
    """
    if gpus == 1:
        return hardware
    if hardware.host_link is None:
        raise UsageError(
            f"the description of {hardware.name} does not say what the GPUs of a host share",
            remedy="Copy its file, add `host_link: {bandwidth: 350.0e9, shared_by: 2}` with the figures of your "
            "host, as measured with all GPUs at work, and give the copy as --hardware.",
        )
    share = hardware.host_link.bandwidth / min(gpus, hardware.host_link.shared_by) / hardware.efficiency.link
    return hardware.model_copy(
        update={"link_out": min(hardware.link_out, share), "link_in": min(hardware.link_in, share)}
    )


def search_request(
    *,
    budget: str | Budget,
    workload: WorkloadSpec | None = None,
    step: Any = None,
    headroom: str | None = None,
    host_budget: str | int | None = None,
    choices: Sequence[str] | None = None,
    hardware: str | Hardware | None = None,
    gpus_per_host: int = 1,
    device: str | None = None,
    global_batch: int | None = None,
    lengths: Any = None,
    longest: bool = False,
    **more: Any,
) -> SearchRequest:
    """Parse arguments into a request; ``more`` are further fields of it. Raises UsageError for contradictions.

    ``budget`` is text such as "24GB", "60%", "60%act" or "auto"; ``headroom`` (text: "2%" of the budget, or "500MB") is
    left free of it, by default as ``Budget.with_headroom`` says. ``host_budget`` (text such as "8GB", or bytes) bounds
    what offloading may claim of host memory, in the search and wherever the plan is applied. ``choices`` are the only
    ones that are tried. ``gpus_per_host``: so many GPUs of the simulated host train at the same time.
    """
    refuse_both(hardware, device)
    described = load_hardware(hardware) if isinstance(hardware, str) else hardware
    if gpus_per_host != 1 and described is None:
        raise UsageError("--gpus-per-host simulates the other GPUs of a host", remedy="Add --hardware.")
    if global_batch is not None and not global_batch > 0:
        raise UsageError(f"--global-batch {global_batch} are no rows", remedy="Give the rows of an optimizer update.")
    if global_batch is not None and lengths is not None:
        raise UsageError(
            "--global-batch and --lengths cannot be combined",
            remedy="Find the micro-batch with --global-batch at the longest sequence first, then give it as "
            "--batch-size with --lengths.",
        )
    if longest and lengths is not None:
        raise UsageError(
            "--seq-len auto and --lengths cannot be combined",
            remedy="Leave one of the two out: --seq-len auto looks for one length, and --lengths gives all of them.",
        )
    try:
        return SearchRequest(
            budget=parse_budget(budget).with_headroom(headroom, simulated=described is not None),
            workload=workload,
            step=step,
            space=SearchSpace() if choices is None else SearchSpace().restricted(tuple(choices)),
            host_budget=parse_size(host_budget) if isinstance(host_budget, str) else host_budget,
            hardware=described and of_host_with(described, gpus_per_host),
            device=device,
            rows_per_update=global_batch,
            lengths=None if lengths is None else lengths_of(lengths),
            longest=longest,
            **more,
        )
    except ValidationError as error:
        (name, why), value = first_violation(error), short(error.errors()[0]["input"])
        raise UsageError(f"{name}={value}: {why}", remedy="See help(autockpt.search).") from None


def refuse_both(hardware: str | Hardware | None, device: str | None) -> None:
    """Raises UsageError where one device is to be simulated and another to be measured on."""
    if hardware is not None and device is not None:
        name = hardware if isinstance(hardware, str) else hardware.name
        raise UsageError(
            f"--hardware {name} simulates a device and --device {device} measures on one",
            remedy="Leave one of the two out.",
        )


def refuse_described(step: Any, given: Mapping[str, Any]) -> None:
    """Raises UsageError for what is no Step, and for arguments that describe a step next to a live one."""
    if not isinstance(step, Step):
        raise UsageError(
            f"a {type(step).__name__} is no training step",
            remedy="Give autockpt.Step(model, batch, optimizer=optimizer), or a model's name.",
        )
    if named := [name for name, value in given.items() if value is not None]:
        raise UsageError(
            f"{named[0]}= does not go with a live step, which is measured where its model is",
            remedy='Leave it out, or give the model\'s name instead: autockpt.search("llama-8b", …).',
        )
