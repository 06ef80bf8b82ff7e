"""What all trainers' callbacks share: apply a plan, or search for one on the trainer's model as training starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed, nn
from tqdm.auto import tqdm

from autockpt.errors import AutockptError, MeasurementError, UsageError
from autockpt.integrations.rows import OWN, largest_batch, lengths_here
from autockpt.progress import LineListener
from autockpt.runtime import Handle, apply, plan_of
from autockpt.schema import words
from autockpt.schema.plan import Plan, applied
from autockpt.schema.request import SearchOutcome
from autockpt.tuning import answer, search_request
from autockpt.workload import Step

TIMEOUT = 600.0
"""Seconds that a search at the start of training may take, by default, where a tenth of the training is not shorter."""
QUIET = 60.0
"""Seconds without a line of progress: a line for every trial would fill the log of the training."""
_SIMULATED = "for FSDP and ZeRO-3 simulated, with `shard: N` in a --job file and --hardware"
_OPTIONS = (
    "timeout", "out", "lengths", "headroom", "host_budget", "allow_inexact", "choices", "trials", "seed", "fresh"
)  # fmt: skip


class PlanCallback:
    """What the callbacks of all trainers share: a plan, or how to find one, and what was attached.

    Raises UsageError unless exactly one of plan and budget is given, for a malformed budget and for options that no
    search has; PlanError for a malformed plan.
    """

    def __init__(
        self, plan: Plan | Mapping[str, Any] | str | Path | None = None, *, budget: str | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.handle: Handle | None = None
        self.plan: Plan | None = None  # yet to be found
        if (plan is None) == (budget is None):
            given = "neither a plan nor a budget" if plan is None else "a plan and a budget"
            raise UsageError(
                f"the callback got {given}",
                remedy='Pass one of both: a plan ("plan.yaml") to apply it, budget="24GB" to search as training '
                "starts.",
            )
        if (unknown := set(options).difference(_OPTIONS)) or (plan is not None and options):
            why = "it does not know" if unknown else "only a search has"
            raise UsageError(
                f"the callback got {', '.join(sorted(unknown or options))}, which {why}",
                remedy=f"Next to budget= it takes {', '.join(f'{name}=' for name in _OPTIONS)}.",
            )
        if plan is not None:
            self.plan = plan_of(plan)
            return
        assert budget is not None
        lengths = options.pop("lengths", None)
        self._own_lengths = isinstance(lengths, str) and lengths == OWN
        self._request = search_request(budget=budget, lengths=None if self._own_lengths else lengths, **options)
        if lengths is not None:
            self._request.budget.refuse_share("differs by length")

    def find_plan(
        self,
        step_of: Callable[[Any], Step],
        first: Any,
        *,
        rows: int | None,
        steps: int | None,
        processes: int,
        dataset: Any,
        collate: Any,
        folder: Path,
    ) -> Plan:
        """Search with the trainer's own step, or find what an earlier run has answered.

        ``step_of`` makes that step of a batch; ``first`` is the batch that training begins with, ``rows`` those of a
        micro-batch by the trainer's settings, ``steps`` the optimizer steps that the training will take where they are
        known. Without a timeout the search takes at most ``TIMEOUT`` or a tenth of the predicted training time,
        whichever is shorter, but at least the baselines. With ``lengths`` the plan has sets of choices for them, or for
        those of the data set. Runs are kept in the trainer's ``folder``, or in ``out`` where that was given. Raises
        what ``autockpt.search`` raises, without its inner frames.
        """
        request = self._request
        batch, source = largest_batch(first, dataset, collate, rows)
        say(f"planning for {source}")
        step, lengths = step_of(batch), OWN if self._own_lengths else request.lengths
        if lengths is not None:
            lengths, note = lengths_here(lengths, step, dataset, collate)
            say(f"lengths: {note}")
        timeout = TIMEOUT if request.timeout is None else request.timeout
        asked = {
            "step": step,
            "lengths": lengths,
            "out": request.out or folder,
            "timeout": timeout,
            "training_steps": steps if request.timeout is None else None,
            "others_wait": processes > 1,
        }
        began, heard = time.monotonic(), LineListener(say, quiet=QUIET, brief=True)
        say(f"searching for a plan within {request.budget.text}, for at most {words.seconds(timeout)}")
        try:
            with heard:
                outcome = answer(request.model_copy(update=asked), heard)
        except AutockptError as error:
            raise error.with_traceback(None) from None
        assert isinstance(outcome, SearchOutcome)
        if (plan := outcome.plan) is None:
            raise KeyboardInterrupt
        if lengths is not None:
            for line in outcome.notes[-2:]:  # what the sets gain, and for which batches
                say(line)
        took = words.seconds(time.monotonic() - began)
        what = f"found in {took}" if heard.trials else f"known from an earlier run, read in {took}"
        say(f"the plan was {what}; `autockpt history {outcome.run_directory} --page` writes a page about it")
        return plan

    def remove(self) -> None:
        """Take the plan off the model where it is still on. Idempotent."""
        if self.handle is not None:
            self.handle.remove()

    def _apply(self, plan: Plan, model: nn.Module, *, aloud: bool) -> None:
        """Apply the plan; the process that is to report it does so, ``aloud``, in one line."""
        self.handle = apply(model, plan)
        if aloud:
            say(f"applied {applied(plan, self.handle.choices)}")


def say(line: str) -> None:
    """Print a line, above a progress bar where there is one."""
    tqdm.write(f"autockpt: {line}")


def refuse_search(callback: str, reasons: Mapping[str, bool], way: str = _SIMULATED) -> None:
    """Raise UsageError with the first of the reasons that holds why no search is possible in a training."""
    if named := [reason for reason, holds in reasons.items() if holds]:
        raise UsageError(
            f"{callback} cannot search here: {named[0]}",
            remedy=f"Search beforehand (`autockpt search --budget …`; {way}) and pass the plan: "
            f'{callback}("plan.yaml").',
        )


def found_once(find: Callable[[], Plan]) -> Plan:
    """The plan that ``find`` returns. Of several processes the first one searches, and the others wait for its answer.

    To be called in all of them. An error of the first is raised in all.
    """
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return find()
    # a group of its own: collectives of the training's group end after minutes, and GPUs would spin while they wait
    group: Any = distributed.new_group(backend="gloo", timeout=timedelta(days=1))
    found: list[Any] = [MeasurementError("the search in the first process was interrupted")]
    try:
        try:
            if distributed.get_rank() == 0:
                found = [find()]
        except AutockptError as error:
            found = [error]
            raise
        finally:
            distributed.broadcast_object_list(found, src=0, group=group)
    finally:
        distributed.destroy_process_group(group)
    if isinstance(found[0], AutockptError):
        raise found[0]
    return found[0]
