"""What is concluded from steps under a plan and reference steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autockpt.policies import POLICIES
from autockpt.policies.selective import kept_by
from autockpt.runtime import Proof, UnitRuns
from autockpt.schema.choices import Choice
from autockpt.schema.sizes import format_bytes
from autockpt.schema.verification import Check
from autockpt.schema.workload import WorkloadSpec

Choices = Mapping[str, Choice]


def smaller_shapes(spec: WorkloadSpec, batch_size: int | None, seq_len: int | None) -> Iterator[WorkloadSpec]:
    """The spec with its batch halved down to one row, then its sequence down to 64 tokens; the largest first."""
    batch_size = spec.batch_size or batch_size or 1
    seq_len = spec.seq_len or seq_len
    while batch_size > 1:
        batch_size //= 2
        yield spec.model_copy(update={"batch_size": batch_size, "seq_len": seq_len})
    while seq_len is not None and seq_len >= 128:
        seq_len //= 2
        yield spec.model_copy(update={"batch_size": batch_size, "seq_len": seq_len, "pad_to": None})


def judge_runs(choices: Choices, found: Mapping[str, UnitRuns]) -> Check:
    """Whether every unit executed again what its choice says, and nothing of what that keeps (but for outputs that were
    changed in place). Units whose output needs no gradient are left out."""
    wrong: list[str] = []
    again = forward = moved = counted = named = kept = 0
    for name, choice in choices.items():
        runs = found.get(name, UnitRuns())
        moved += runs.moved_bytes
        if not runs.trains:
            continue
        counted += 1
        forward += runs.forward
        again += runs.again
        least, most = POLICIES[choice.kind].reruns(choice, runs.forward)
        if not least <= runs.again <= most:
            wrong.append(f"{name} ({choice}: {runs.again} of {runs.forward})")
        elif kept_by(choice) and not runs.ops_again:
            wrong.append(f"{name} ({choice}: nothing runs again, so everything is kept)")
        elif runs.named_again > runs.changed:
            wrong.append(f"{name} ({choice}: {runs.named_again} of {runs.named} that it keeps run again)")
        named += runs.named
        kept += runs.named - runs.named_again
    sent = f", {format_bytes(moved)} moved off the device" if moved else ""
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return Check(name="recomputed ops", state="failed", detail=f"not as planned: {', '.join(wrong[:3])}{more}")
    if not counted or not forward:
        detail = "no unit executes matrix products, attentions or convolutions that take part in backward"
        return Check(name="recomputed ops", state="skipped", detail=detail)
    detail = f"{again} of {forward} matrix products, attentions and convolutions in {counted} units run again{sent}"
    if named:
        detail += f"; {kept} of {named} outputs that are to be kept are not made again"
    return Check(name="recomputed ops", state="passed", detail=detail)


def judge_proof(proof: Proof) -> Check:
    """What sentinels have compared in the step; what differs has ended it."""
    name = "sentinels"
    unchecked = {why for unit in proof.units.values() for why in unit.unchecked} | set(proof.unwatched.values())
    besides = f"; not checked: {', '.join(sorted(unchecked))}" if unchecked else ""
    if not proof.checks:
        detail = f"nothing runs again or comes back from elsewhere{besides}"
        return Check(name=name, state="skipped", detail=detail)
    units = sum(1 for unit in proof.units.values() if unit.checks)
    detail = f"{proof.tensors} tensors that backward of {units} units was given are those that forward had computed"
    return Check(name=name, state="passed", detail=f"{detail}{besides}")
