"""What people do with streams, threads and graphs, on a small model: the same gradients are wanted under every plan.

Each scenario takes a model and gives everything that it computed. What is not among the fixed ones is drawn by chance:
threads, graphs kept and used twice, evaluation, autocast, errors in backward, gradients of inputs. What one stream
makes and another uses is waited for here, as in a user's own code; so whatever is not ordered is this tool's.
"""

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from autockpt.checkpointing import fingerprint as fingerprints
from autockpt.devices import disk, hostpool
from autockpt.runtime import attach
from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, Choice, Offload, RecomputeOffload, parse_choice

standin = torch.get_device_module("standin")
DEVICE = torch.device("standin", 0)
BLOCKS = 4
ALL = os.environ.get("STANDIN_ALL") == "1"  # every plan under every schedule, and more of what is drawn by chance
hostpool.AREA_BYTES = 1 << 20  # pools of these small models grow, and the stand-in poisons no more than they need
DISK = Offload(tier="disk")
PLANS: dict[str, list[Choice]] = {
    "offload": [OFFLOAD] * BLOCKS,
    "every other": [OFFLOAD, SAVE, OFFLOAD, SAVE],
    "disk": [DISK] * BLOCKS,
    "wide windows": [Offload(window=2), Offload(window=3), SAVE, OFFLOAD],
    "wide windows, one waits": [Offload(window=3), SAVE, RECOMPUTE, SAVE],
    "inputs only": [RecomputeOffload()] * BLOCKS,
    "mixed": [DISK, OFFLOAD, RECOMPUTE, RecomputeOffload(tier="disk")],
    "made again": [parse_choice("remake"), parse_choice("selective"), OFFLOAD, parse_choice("remake")],
}


class Block(nn.Module):
    """``stream``: where it computes, of the model's own two; None: wherever it is called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.sin(self.up(self.norm(x)))))


class Twofold(Block):
    """Saves one tensor on two streams."""

    def forward(self, x: Tensor) -> Tensor:
        shared = self.up(self.norm(x)).sin()
        side = SIDES[0]
        with on(side):
            shared.record_stream(side)
            left = shared * shared.cos()
        left.record_stream(torch.accelerator.current_stream())
        return x + self.down(left + shared.sin() * 0.1)


class Counting(Block):
    """Has state that each forward changes in place, and reads, on two streams."""

    calls: Tensor
    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with on(SIDES[0]):
            x.record_stream(SIDES[0])
            self.mean.lerp_(x.detach().float().mean(0), 0.1)
            shifted = (x - self.mean) / self.calls.clone()
        shifted.record_stream(torch.accelerator.current_stream())
        return super().forward(shifted)


class Reads(torch.autograd.Function):
    """Its backward reads what it saved, and gives nobody a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.sin(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        ctx.saved_tensors[0].sum()


class Aside(Block):
    """Where it computes on a stream of its own, nobody has a reason to wait for that when backward ends."""

    def forward(self, x: Tensor) -> Tensor:
        return Reads.apply(x)  # type: ignore[return-value]


class Model(nn.Module):
    def __init__(self, block: type[Block] = Block, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, 8)
        self.streams: list[Any] = []  # blocks compute on these by turns

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for n, block in enumerate(self.blocks):
            with on(self.streams[n % len(self.streams)]) if self.streams else nullcontext():
                x.record_stream(torch.accelerator.current_stream())
                x = block(x)
            x.record_stream(torch.accelerator.current_stream())
        return self.head(x).float().pow(2).mean()


SIDES = [torch.Stream(DEVICE) for _ in range(2)]


@contextmanager
def on(stream: Any) -> Iterator[None]:
    """Compute on that stream, after what was queued so far; whatever is queued later comes after that."""
    before = torch.accelerator.current_stream()
    stream.wait_event(before.record_event())
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        before.wait_event(stream.record_event())


def batch(seed: int = 3) -> Tensor:
    return torch.randn(128, 64, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            p.grad.record_stream(torch.accelerator.current_stream())  # which need not be the one that it was made on
            found[name] = p.grad.clone()
    model.zero_grad()
    return found


def step(model: nn.Module) -> dict[str, Tensor]:
    model(batch()).backward()
    return gradients(model)


def _twice(model: nn.Module) -> dict[str, Tensor]:
    return step(model) | {f"again {name}": g for name, g in step(model).items()}


def _partial_backward(model: Model) -> dict[str, Tensor]:
    parameters = list(model.blocks[2].parameters())
    found = torch.autograd.grad(model(batch()), parameters)
    return {f"part {n}": g for n, g in enumerate(found)} | step(model)


def _batches_of_all_lengths(model: nn.Module) -> dict[str, Tensor]:
    for seed, length in enumerate([128, 72, 104, 40, 128, 96]):
        model(batch(seed)[:length]).backward()
    return gradients(model)


class _Stopped(Exception):
    pass


def _stop(*_: Any) -> None:
    raise _Stopped


def _in_a_thread(work: Callable[[], None], stream: Any) -> None:
    before = torch.accelerator.current_stream().record_event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            torch.accelerator.set_stream(stream)
            stream.wait_event(before)
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    torch.accelerator.current_stream().wait_event(stream.record_event())


def _units_on_two_streams(model: Model) -> dict[str, Tensor]:
    model.streams = list(SIDES)
    return _twice(model)


def at_once(model: Model, batches: list[Tensor]) -> dict[str, Tensor]:
    """Two graphs, each on a stream of its own from its forward to its backward; nothing orders one after the other."""
    before, parameters, losses, found = torch.accelerator.current_stream(), list(model.parameters()), [], {}
    start = before.record_event()
    for side, x in zip(SIDES, batches, strict=True):
        side.wait_event(start)
        x.record_stream(side)
    try:
        for side, x in zip(SIDES, batches, strict=True):
            torch.accelerator.set_stream(side)
            losses.append(model(x))
        for n, (side, loss) in enumerate(zip(SIDES, losses, strict=True)):
            torch.accelerator.set_stream(side)
            found |= {f"{n} {i}": g for i, g in enumerate(torch.autograd.grad(loss, parameters))}
    finally:
        torch.accelerator.set_stream(before)
    for side in SIDES:
        before.wait_event(side.record_event())
    for gradient in found.values():
        gradient.record_stream(before)
    return found


def _two_streams_at_once(model: Model) -> dict[str, Tensor]:
    fingerprints._tables.clear()  # which every stream then needs
    seen = {}
    for n in range(3):
        seen |= {f"{n} {name}": g for name, g in at_once(model, [batch(n), batch(n + 1)]).items()}
        torch.full((1 << 14,), 7.0, device=DEVICE)  # takes what was freed
    return seen


def _trained(model: nn.Module) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for seed in range(3):
        model(batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def beside(model: nn.Module, first: list[int], later: int) -> dict[str, Tensor]:
    """A forward on another stream does not wait for the backward before it, and takes the host memory that is free.
    Of batches of these lengths; the ``first`` are checked by sentinels, for which the host waits."""
    here, aside = torch.accelerator.current_stream(), SIDES[0]
    for seed, length in enumerate(first):
        model(batch(seed)[:length]).backward()
    loss, last = model(batch()), batch(1)[:later]
    begun = here.record_event()
    loss.backward()
    aside.wait_event(begun)
    torch.accelerator.set_stream(aside)
    try:
        loss = model(last)
    finally:
        torch.accelerator.set_stream(here)
        here.wait_event(aside.record_event())
    loss.backward()
    return gradients(model)


def _forward_beside_a_backward(model: nn.Module) -> dict[str, Tensor]:
    return beside(model, [128, 128], 128)


def _forward_of_another_length_beside_a_backward(model: nn.Module) -> dict[str, Tensor]:
    return beside(model, [128, 40, 72], 104)


SCENARIOS: dict[str, Callable[[Model], dict[str, Tensor]]] = {
    name.strip("_").replace("_", " "): function
    for name, function in list(globals().items())
    if name.startswith("_") and getattr(function, "__annotations__", {}).get("return") == dict[str, Tensor]
}


ACTIONS = ("step", "forward", "backward", "twice", "drop", "look", "fill", "stop", "part", "fail", "input", "both")


def generated(seed: int, block: type[Block] = Block) -> Callable[[Model], dict[str, Tensor]]:
    """A scenario drawn by chance: graphs made, kept, dropped and run backward, on streams and threads as they come.

    Two streams at once only with blocks that have no state: what changes it would race in plain training.
    """

    def scenario(model: Model) -> dict[str, Tensor]:
        dice = random.Random(seed)
        streams = [None, None, *SIDES]
        model.streams = dice.choice([[], [], list(SIDES), [SIDES[1]]])
        held: list[Tensor] = []
        seen: dict[str, Tensor] = {}

        def forward(n: int) -> Tensor:
            cast = torch.autocast("standin", dtype=torch.bfloat16) if dice.random() < 0.2 else nullcontext()
            with cast:
                return model(batch(n))

        def backward(loss: Tensor, retain: bool) -> None:
            if dice.random() < 0.3:
                _in_a_thread(lambda: loss.backward(retain_graph=retain), dice.choice(SIDES))
            else:
                loss.backward(retain_graph=retain)

        for n in range(8):
            stream = dice.choice(streams)
            with on(stream) if stream is not None else nullcontext():
                action = dice.choice(ACTIONS if block is not Counting else ACTIONS[:-1])
                if action == "step":
                    backward(forward(n), False)
                elif action == "forward":
                    held.append(forward(n))
                elif action == "backward" and held:
                    backward(held.pop(dice.randrange(len(held))), False)
                elif action == "twice" and held:
                    loss = held.pop(dice.randrange(len(held)))
                    backward(loss, True)
                    backward(loss, False)
                    del loss
                elif action == "drop" and held:
                    held.pop(dice.randrange(len(held)))
                elif action == "look":
                    with torch.no_grad():
                        seen[f"{n} loss"] = model(batch(n))
                elif action == "fill":
                    torch.full((dice.choice((1 << 12, 1 << 14, 1 << 18)),), 7.0, device=DEVICE)
                elif action == "stop":
                    hook = dice.choice(model.blocks).register_forward_hook(_stop)
                    with suppress(_Stopped):
                        forward(n)
                    hook.remove()
                elif action == "fail":
                    hook = dice.choice(model.blocks).up.weight.register_hook(_stop)
                    with suppress(_Stopped):
                        forward(n).backward()
                    hook.remove()
                    for side in SIDES:  # for which a backward that failed has not waited
                        torch.accelerator.current_stream().wait_event(side.record_event())
                    gradients(model)
                elif action == "input":
                    x = batch(n).requires_grad_()
                    (seen[f"{n} input"],) = torch.autograd.grad(model(x), x)
                    seen[f"{n} input"].record_stream(torch.accelerator.current_stream())
                elif action == "both":
                    streams_then, model.streams = model.streams, []
                    seen |= {f"{n} both {i}": g for i, g in at_once(model, [batch(n), batch(n + 1)]).items()}
                    model.streams = streams_then
                elif action == "part":
                    parameters = list(dice.choice(model.blocks).parameters())
                    for i, found in enumerate(torch.autograd.grad(forward(n), parameters)):
                        found.record_stream(torch.accelerator.current_stream())
                        seen[f"{n} part {i}"] = found
        for loss in held:
            loss.backward()
        return seen | gradients(model)

    return scenario


def run(
    scenario: Callable[[Model], dict[str, Tensor]], plan: list[Choice] | None, block: type[Block] = Block
) -> dict[str, Tensor]:
    """What a scenario gives under a plan (None: plain training), on the host."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(block).to(DEVICE)
    torch.manual_seed(5)
    choices = {} if plan is None else {f"blocks.{n}": choice for n, choice in enumerate(plan)}
    with attach(model, choices) if choices else nullcontext():
        seen = scenario(model)
    del model
    return {name: value.cpu() for name, value in seen.items()}


def announced(move: Callable[..., None]) -> Callable[..., None]:
    """The disk tier's own reading and writing of pinned memory, which no device sees, told to the stand-in."""

    def told(room: disk.FileRoom, way: Any, memory: Tensor, part: slice) -> None:
        standin.extension.host_touches(
            memory.data_ptr(), hostpool.whole_pages(part.stop - part.start), way is os.preadv
        )
        move(room, way, memory, part)

    return told


disk.FileRoom.move = announced(disk.FileRoom.move)  # type: ignore[method-assign]
