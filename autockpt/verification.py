"""Compare what steps under a plan and plain training leave behind: losses, gradients, buffers and random states.

An observation holds them bit by bit, as short digests that can be compared across plans and processes. Where bits may
differ (other processes, devices whose kernels do not repeat themselves, choices that are not exact) a count sketch of
each tensor tells how far two of them are apart (``checkpointing.fingerprint``).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from autockpt.checkpointing.arguments import tensors_of
from autockpt.checkpointing.fingerprint import TOLERANCE, sketch_of
from autockpt.devices.accelerator import kinds_in_use
from autockpt.devices.cuda import DETERMINISTIC, WORKSPACE
from autockpt.devices.random_states import RandomStates, TorchStates
from autockpt.interpreter import patched
from autockpt.schema.base import Data

SMALL = 1e-3
"""Gradients this many times shorter than the longest are mostly rounding: their error is taken relative to that."""
_SHOWN = 3  # differences
T = TypeVar("T")
ForwardBackward = Callable[[Callable[[], None]], Tensor]
"""One forward and backward; calls its argument between the two and returns the loss. Gradients stay in ``.grad``."""


class Observation(Data):
    """Digests by what they are of (``step 2: gradient model.norm.weight``), and norms of the gradients.

    ``sketches`` of losses and gradients, where asked for, tell how far apart those of two observations are;
    ``coarsest`` is the coarsest floating point type that the model computed in.
    """

    digests: dict[str, str]
    norms: dict[str, float]
    sketches: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    coarsest: str = ""

    def differences(self, other: Observation) -> list[str]:
        """What is not bit-equal, in order; entries that only one of the two has count as well."""
        names = list(dict.fromkeys((*self.digests, *other.digests)))
        return [name for name in names if self.digests.get(name) != other.digests.get(name)]

    @property
    def draws(self) -> bool:
        """Whether the steps draw random numbers (dropout): else both begin and end in the same state."""
        return len({digest for name, digest in self.digests.items() if "random state" in name}) > 1

    def distances(self, other: Observation) -> dict[str, float]:
        """How far sketched losses and gradients are apart, each relative to its own length (see ``SMALL``)."""
        lengths = {name: math.hypot(*sketch) for name, sketch in self.sketches.items()}
        longest = max((length for name, length in lengths.items() if not name.endswith(": loss")), default=0.0)
        found = {}
        for name, sketch in self.sketches.items():
            pairs = zip(sketch, other.sketches.get(name, (math.inf,) * len(sketch)), strict=True)
            away = math.hypot(*(0.0 if a == b or (a != a and b != b) else a - b for a, b in pairs))
            scale = lengths[name] if name.endswith(": loss") else max(lengths[name], SMALL * longest)
            found[name] = 0.0 if away == 0 else away / scale if scale else math.inf
        return found

    def largest_deviation(self, other: Observation) -> float:
        """The largest relative difference of two gradients' norms; a measure of size, not a proof."""
        pairs = ((norm, other.norms.get(name, 0.0)) for name, norm in self.norms.items())
        return max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b), default=0.0)


def observe(
    model: nn.Module,
    forward_backward: ForwardBackward,
    *,
    steps: int = 2,
    sketched: bool = False,
    typed: bool = True,
    weights: bool = False,
) -> Observation:
    """Run ``steps`` accumulating forwards and backwards and note all that they compute or change.

    Losses, random states after each forward and backward, buffers and gradients; where they change ``weights``, these.
    Buffers, gradients and random states are restored afterwards. ``sketched``: with sketches of losses and gradients,
    and unless ``typed`` is False with the coarsest type, which takes a hook on every module: compiled models are
    compiled again under it.
    """
    digests: dict[str, str] = {}
    norms: dict[str, float] = {}
    sketches: dict[str, tuple[float, ...]] = {}

    def note(name: str, tensor: Tensor) -> None:
        digests[name] = digest(tensor)
        if sketched:
            sketches[name] = tuple(sketch_of(_local(tensor)).tolist())

    with kept_state(model), coarsest_type(model) if sketched and typed else nullcontext([]) as types:
        for i in range(1, steps + 1):
            prefix = f"step {i}: "

            def between(prefix: str = prefix) -> None:
                digests[f"{prefix}random state after forward"] = _digest_of_random_state()

            loss = forward_backward(between)
            note(f"{prefix}loss", loss)
            digests[f"{prefix}random state after backward"] = _digest_of_random_state()
            for name, buffer in model.named_buffers():
                digests[f"{prefix}buffer {name}"] = digest(buffer)
            for name, parameter in model.named_parameters():
                if weights:
                    note(f"{prefix}weight {name}", parameter)
                if (gradient := parameter.grad) is None:
                    digests[f"{prefix}gradient {name}"] = "none"
                else:
                    note(f"{prefix}gradient {name}", gradient)
                    norms[f"{prefix}gradient {name}"] = float(_local(gradient).detach().float().norm())
    return Observation(digests=digests, norms=norms, sketches=sketches, coarsest=coarsest(types) if sketched else "")


@contextmanager
def coarsest_type(model: nn.Module) -> Iterator[list[str]]:
    """Collects the floating point types that the model's modules give out; ``coarsest`` picks one."""
    found = list({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()})

    def note(_: nn.Module, __: object, output: object) -> None:
        for tensor in tensors_of(output):
            if tensor.is_floating_point() and (name := str(tensor.dtype)[6:]) not in found:
                found.append(name)

    handle = register_module_forward_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def coarsest(types: Sequence[str]) -> str:
    """The type with the largest tolerance; one that has none, such as fp8, counts as bfloat16."""
    known = [t if t in TOLERANCE else "bfloat16" for t in types]
    return max(known, key=TOLERANCE.__getitem__, default="float32")


@contextmanager
def kept_state(model: nn.Module) -> Iterator[None]:
    """Gradients, buffers and random states as they were, whatever the block does. Gradients are set aside inside it."""
    gradients = [(p, p.grad) for p in model.parameters()]
    homes = [owner._buffers for owner in model.modules()]
    buffers = [(home, name, b, b.detach().clone()) for home in homes for name, b in home.items() if b is not None]
    random_states = RandomStates()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for home, name, buffer, before in buffers:
                home[name] = buffer
                buffer.copy_(before)
        random_states.restore()


def deterministically(run: Callable[[], T]) -> T:
    """What ``run()`` gives under deterministic algorithms: strictly on accelerators, if the step allows it.

    Unless it is strict, PyTorch leaves the backward of fused attention as it is, with a warning
    (``attention_backward.cu`` of torch 2.11 to 2.13). ``run`` begins again where it has an operation without a
    deterministic kernel, or where CUBLAS_WORKSPACE_CONFIG was not set before the process's first matrix product
    (``alertCuBLASConfigNotDeterministic`` looks once).
    """
    if kinds_in_use():
        try:
            with deterministic_algorithms(strict=True):
                return run()
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
    with deterministic_algorithms():
        return run()


@contextmanager
def deterministic_algorithms(strict: bool = False) -> Iterator[None]:
    """PyTorch's deterministic kernels where it has them; operations without one run as they are, or fail (``strict``).

    Matrix products of one stream are deterministic whatever cuBLAS' workspace is; the variable only says so. New memory
    is not filled with NaN, as PyTorch would: that costs a kernel for every tensor.
    """
    workspace = os.environ.get(WORKSPACE)
    if strict and workspace is None:
        os.environ[WORKSPACE] = DETERMINISTIC
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    cudnn, filled = torch.backends.cudnn, patched(torch.utils.deterministic, "fill_uninitialized_memory", False)
    try:
        with filled, patched(cudnn, "deterministic", True), patched(cudnn, "benchmark", False):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        if workspace is None:
            os.environ.pop(WORKSPACE, None)


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)  # FSDP2 and tensor parallelism: this process's share
    return tensor if to_local is None else to_local()


def digest(tensor: Tensor) -> str:
    """A digest of a tensor's type, shape and bytes, the same in every process; one host copy of it is made."""
    tensor = _local(tensor).detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    header = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.blake2b(header + flat.numpy().tobytes(), digest_size=12).hexdigest()


def _digest_of_random_state() -> str:
    return " ".join(map(digest, TorchStates().tensors))


class GradientCheck(Data):
    """How a plan's steps compare with a reference's.

    ``repeatable`` is False where the reference, run twice, did not give the same bits even with deterministic
    algorithms; ``equal`` then means that the plan deviates no more than the reference does from itself.
    """

    equal: bool
    repeatable: bool = True
    deterministic: bool = Field(default=False, description="deterministic algorithms were needed")
    compared: int = Field(default=0, description="losses, gradients, buffers and random states")
    differences: tuple[str, ...] = ()
    deviation: float = Field(default=0.0, description="largest relative difference of two gradient norms")
    tolerance: float | None = Field(
        default=None, description="losses and gradients count as equal within this, relative to their length"
    )
    distance: float = Field(default=0.0, description="largest distance of two losses or gradients, relative as well")

    def describe(
        self, reference: str = "plain training", because: str = "the plan has a choice that is not exact"
    ) -> str:
        """The result in one line. ``because``: why equal up to rounding is all that can be asked."""
        how = " under deterministic algorithms (without them it varies by itself)" if self.deterministic else ""
        if self.tolerance is not None:
            how += f" (distances up to {self.distance:.1e}, tolerance {self.tolerance:.0e})"
        if not self.equal:
            more = f" and {len(self.differences) - _SHOWN} more" if len(self.differences) > _SHOWN else ""
            return (
                f"{len(self.differences)} of {self.compared} values differ from {reference}{how}: "
                f"{', '.join(self.differences[:_SHOWN])}{more}; gradient norms by up to {self.deviation:.1e}"
            )
        if not self.repeatable:
            unset = torch.cuda.device_count() > 0 and WORKSPACE not in os.environ
            hint = f" (on a GPU it may, with {WORKSPACE}={DETERMINISTIC} set before Python starts)" if unset else ""
            return f"{reference} does not repeat itself bit by bit{hint}, and the plan deviates from it no more{how}"
        if self.tolerance is not None:
            return (
                f"equal with {reference} up to rounding, as {because}: losses and gradients of "
                f"two steps{how}; buffers and random states are bit-equal"
            )
        what = f"losses, gradients, buffers and random states of two steps ({self.compared} values)"
        return f"{what} are bit-equal with {reference}{how}"


class Reference(NamedTuple):
    """Two observations of what a plan is compared with, and whether deterministic algorithms were needed."""

    first: Observation
    second: Observation
    deterministic: bool


def observe_reference(observe: Callable[[bool], Observation], again: Callable[[], object] = lambda: None) -> Reference:
    """Observe it twice, and where these differ twice ``again``: ``observe`` is told to use deterministic algorithms."""
    first, second = observe(False), observe(False)
    if not first.differences(second):
        return Reference(first, second, False)
    again()
    return Reference(observe(True), observe(True), True)


def judge(reference: Reference, planned: Observation) -> GradientCheck:
    """The verdict on a plan's observation.

    Sketched losses and gradients may be a little apart; whatever else then differs must vary in the reference, too.
    """
    first, second, deterministic = reference
    varying, differences = set(first.differences(second)), first.differences(planned)
    deviation = first.largest_deviation(planned)
    tolerance, away, excused = None, dict[str, float](), False
    if first.sketches:
        tolerance = max(TOLERANCE[o.coarsest] for o in (first, planned))
        away, by_itself = first.distances(planned), first.distances(second)
        close = {name for name in away if away[name] <= max(tolerance, 4 * by_itself[name])}
        differences = [name for name in differences if name not in close | (varying - away.keys())]
    elif varying:
        excused = set(differences) <= varying and deviation <= 4 * first.largest_deviation(second)
    return GradientCheck(
        equal=not differences or excused,
        repeatable=tolerance is not None or not varying,
        deterministic=deterministic,
        compared=len(first.digests),
        differences=tuple(differences),
        deviation=deviation,
        tolerance=tolerance,
        distance=max(away.values(), default=0.0),
    )
