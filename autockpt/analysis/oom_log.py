"""Find an out-of-memory error in a log: the figures of PyTorch's message, and the stack in front of it.

The wordings are those of c10's caching allocator from 1.0 on (CUDA, HIP, XPU and copies of it), of
``cudaMallocAsync``, and of MPS. Launchers and loggers may put anything in front of a line: patterns look behind it.
Sizes are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from autockpt.errors import UsageError
from autockpt.schema.base import Data
from autockpt.schema.files import reason

Stage = Literal["loading", "batch", "forward", "loss", "backward", "recompute", "optimizer", "evaluation", "unknown"]


class DeviceFailure(Data):
    """An out-of-memory message of a device's allocator, in bytes; None where the message does not say."""

    backend: str = Field(default="cuda", description="cuda, hip, xpu, mps, …")
    rank: int | None = None
    device: int | None = None
    tried: int | None = Field(default=None, description="what was requested, rounded up by the allocator")
    capacity: int | None = Field(default=None, description="what the device has; on MPS what PyTorch may take")
    free: int | None = None
    process: int | None = Field(default=None, description="this process, everything included")
    others: int | None = Field(default=None, description="other processes")
    allocated: int | None = Field(default=None, description="in tensors")
    cached: int | None = Field(default=None, description="reserved by the allocator beyond that")
    stage: Stage = "unknown"
    at: str = Field(default="", description="the innermost line of the user's own code: train.py:80")
    text: str = Field(default="", description="the message")

    @property
    def context(self) -> int | None:
        """What the process held outside the allocator: context, kernels, communication buffers."""
        if self.process is None or self.allocated is None:
            return None
        held = self.process - self.allocated - (self.cached or 0)
        return held if held >= 0 else None


class LogReading(Data):
    """What a log tells of its last failure, and of its run."""

    failure: DeviceFailure | None = None
    host: bool = Field(default=False, description="the host's memory ran out, not the device's")
    ranks: tuple[int, ...] = Field(default=(), description="ranks that ran out of memory")
    world: int | None = Field(default=None, description="ranks of the run")


_MOST_READ = 64 << 20  # bytes at a log's end
_STACK = 1 << 16  # characters before a message that its stack is looked for in
_MESSAGE = 2000  # characters
_MESSAGES = 100  # the last ones that are looked at
_LARGEST = 2**50
_HIDDEN = 256 << 20  # bytes that no process accounts for, from which on another one is assumed to hold them
_SIZE = r"([0-9]{1,20}(?:\.[0-9]{1,6})?) ?(bytes?|[KMGT]i?B)"
_BEGINS = re.compile(
    r"\b(?!ERROR|FATAL|CPU|RAM|HOST|SYSTEM)([A-Z]{3,8})(?: backend| driver)?(?: error:)? out of memory"
    r"|\bAllocation on device\b|\bInvalid buffer size: (?=[0-9])|\b(CUBLAS|CUDNN)_STATUS_(?:INTERNAL_ERROR_DEVICE_)?"
    r"ALLOC(?:ATION)?_FAILED"
)
_NEXT = re.compile(
    r"Traceback \(most|\bFile \"|During handling|\w+Error: |(?<=.{20})\b[A-Z]\w+ (?:backend )?out of mem"
)
_EXCEPTION = re.compile(r"\b\w*(?:Error|Exception)\b")
_NOISE = re.compile(r"[\s│|]+")
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_RANK = re.compile(r"\[(?:rank|default)(\d{1,5})\]|^ *(\d{1,5}): |^\[\d+,(\d{1,5})\]<std")
_FIELDS = {
    "tried": rf"(?:Tried to allocate|Requested(?: size)? *:|Invalid buffer size:) {_SIZE}",
    "capacity": rf"(?:capaci?ty of|max allowed:|Device limit *:) {_SIZE}|{_SIZE} total capacity",
    "free": rf"(?:of which|;) {_SIZE} (?:is )?free\b|Free \(according to \w+\) *: {_SIZE}",
    "process": rf"this process has {_SIZE} memory in use",
    "allocated": rf"{_SIZE} (?:is allocated by PyTorch|already allocated)|(?:MPS|Currently) allocated *: {_SIZE}",
    "cached": rf"{_SIZE} (?:is reserved by PyTorch but unallocated|cached\))",
    "reserved": rf"{_SIZE} reserved in total by PyTorch",
    "others": rf"other allocations: {_SIZE}",
}
_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _FIELDS.items()}
_DEVICE = re.compile(r"\b[A-Z]{1,4}U +(\d{1,4})\b|on device +(\d{1,4})\b")
_PROCESS = re.compile(rf"Process \d+ has {_SIZE} memory in use")

# Python's own tracebacks, and IPython's
_FRAME = re.compile(r'File (?:"([^"\n]{1,300})", line |([^"\n:]{1,300}):)(\d{1,9}), in ([^\n]{1,200})\n?([^\n]{0,300})')
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3", "<")
# what a frame (file, function, source line) says about the stage; the first pattern that any frame has
_STAGES: tuple[tuple[Stage, re.Pattern[str]], ...] = (
    ("evaluation", re.compile(r" (?:evaluate|evaluation_loop|prediction_step|generate|validation_step)\b")),
    ("optimizer", re.compile(r"/optim/|\bopt\w*\.step\(")),
    ("recompute", re.compile(r"/torch/utils/checkpoint\.py (?:unpack_hook|recompute_fn|backward)\b")),
    ("backward", re.compile(r"/torch/autograd/\S+ (?:backward|_engine_run_backward|grad)\b|\.backward\(")),
    ("loss", re.compile(r"/loss/loss_utils\.py|cross_entropy|ForCausalLMLoss|loss_function\(|lm_head\(|logits\.float")),
    ("loading", re.compile(r" (?:from_pretrained|load_state_dict|_apply|_move_model_to_device|from_config)\b")),
    ("forward", re.compile(r" (?:\w+\.)?(?:forward|_call_impl|_wrapped_call_impl)\b")),
    ("batch", re.compile(r" (?:_prepare_inputs?|send_to_device|pin_memory|_pin_memory_loop)\b")),
)

_HOST = re.compile(
    r"killed by signal: (?:Bus error|Killed)|(?:insufficient|out of) shared memory"
    r"|DataLoader worker \(pid\(?s?\)? [\d, ]+\)? exited unexp"
    r"|DefaultCPUAllocator: (?:can't allocate memory|not enough memory)|\bMemoryError\b(?!\s*as)"
    r"|Unable to allocate [\d.]+ [KMGT]iB|cannot allocate memory|std::bad_alloc|exit ?code *: -9\b|exit code:? *137"
    r"|OOM ?Killed|OOM killer|oom[-_]kill|node running low on memory|\bSIGKILL\b|Out of memory: Killed process"
    r"|^\s*(?:\S+: line \d+: *\d+ )?Killed\b",
    re.IGNORECASE | re.MULTILINE,
)
_WORLD = re.compile(
    r"\bworld[_ ]size[ \"']{0,3}[:=] {0,3}([0-9]{1,6})\b|--(?:nproc[_-]per[_-]node|num_processes)[= ]([0-9]{1,6})\b"
    r"|\brank:? [0-9]{1,6} ?(?:/|of) ?([0-9]{1,6})\b",
    re.IGNORECASE,
)
_LAST_ERROR = re.compile(r"^.{0,100}?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.{0,160})", re.M)


def read_log(path: Path) -> LogReading:
    """What the end of a log says about running out of memory.

    Raises UsageError for a file that cannot be read, or in which nothing ran out of memory.
    """
    try:
        with path.open("rb") as file:
            head = file.read(2)
            file.seek(max(0, file.seek(0, 2) - _MOST_READ))
            data = file.read(_MOST_READ)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}", remedy="Name the log of the failed run.") from None
    # PowerShell's redirection writes UTF-16
    text = data.decode("utf-16" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8", errors="replace")
    reading = read_text(text)
    if reading.failure is None and not reading.host:
        errors = _LAST_ERROR.findall(text[-_STACK:])
        raise UsageError(
            f"{path} has no out-of-memory message of PyTorch{f'; it ends with {errors[-1]}' if errors else ''}",
            remedy="Name the log that has the message “CUDA out of memory. Tried to allocate …” (standard error of the "
            "run).",
        )
    return reading


def read_text(text: str) -> LogReading:
    """The same for text. Nothing is raised: a reading without a failure says that there is none."""
    text = _ANSI.sub("", text).replace("\r", "\n")
    found = list(_failures(text))
    failures = [f for f in found if f.tried is not None or f.allocated is not None] or found
    failure = None
    if failures:
        # a message is often printed again without its stack: of the same one, that which says most
        last = (failures[-1].tried, failures[-1].allocated)
        same = [f for f in failures if (f.tried, f.allocated) == last]
        failure = max(same, key=lambda f: (f.rank is not None, f.stage != "unknown"))
    # a run may outlive its device's failure and be ended by the host's
    after = text[text.rfind(failure.text[:80]) :] if failure is not None else text
    host = _HOST.search(after if failure is None else after[_STACK:]) is not None
    return LogReading(
        failure=None if host else failure,
        host=host,
        ranks=tuple(sorted({f.rank for f in failures if f.rank is not None})),
        world=_last(_WORLD, text),
    )


def _failures(text: str) -> Iterator[DeviceFailure]:
    """The last failures that a text tells of, in their order."""
    for begins in list(_BEGINS.finditer(text))[-_MESSAGES:]:
        start = begins.start()
        before = text[max(0, start - _STACK) : start]
        stack, _, line = before.rpartition("\n")
        rank = _number(_RANK.search(line))
        message = _NEXT.split(_NOISE.sub(" ", text[start : start + _MESSAGE]))[0]
        failure = parse_message(message)
        if failure.tried is None and not _EXCEPTION.search(line):
            continue  # somebody writes about running out of memory
        if rank is not None:  # lines of other ranks stand between
            stack = "\n".join(row for row in stack.splitlines() if _number(_RANK.search(row)) == rank)
        yield failure.model_copy(update={"rank": rank} | _place(stack[stack.rfind("Traceback") :]))


def _place(stack: str) -> dict[str, Any]:
    """The stage of training that a stack belongs to, by names, and the innermost line of the user's own code."""
    frames = [((m[1] or m[2]).replace("\\", "/"), m[3], m[4], m[5]) for m in _FRAME.finditer(stack)]
    stack_text = "\n".join(f"{file} {function} {code}" for file, _, function, code in frames)
    own = [f"{file.rsplit('/', 1)[-1]}:{line}" for file, line, *_ in frames if not any(p in file for p in _INSTALLED)]
    stage = next((stage for stage, pattern in _STAGES if pattern.search(stack_text)), "unknown")
    return {"stage": stage, "at": own[-1] if own else ""}


def parse_message(text: str) -> DeviceFailure:
    """The figures of one message; what it does not say, or what cannot be, is None."""
    sizes: dict[str, Any] = {name: _bytes(pattern.search(text)) for name, pattern in _PATTERNS.items()}
    reserved, allocated = sizes.pop("reserved"), sizes["allocated"]
    if reserved is not None and allocated is not None:
        sizes["cached"] = max(0, reserved - allocated)
    held, capacity = (allocated or 0) + (sizes["cached"] or 0), sizes["capacity"]
    named = [size for match in _PROCESS.finditer(text) if (size := _bytes(match)) is not None]
    process = sizes["process"]
    if process is not None and not 0.99 * held <= process <= (capacity or _LARGEST):
        process = sizes["process"] = None  # an unsigned difference wrapped around
    if process is None and allocated is not None:
        # in a container a process does not know its own number: it is the next one above what PyTorch holds
        process = sizes["process"] = min((size for size in named if size >= 0.99 * held), default=None)
        named = named if process is None else [size for size in named if size != process]
    others = sum(named) + (sizes["others"] or 0)
    if capacity is not None and sizes["free"] is not None:
        hidden = capacity - sizes["free"] - (process or held)
        told = "process" in text and hidden >= _HIDDEN  # a message that lists processes need not list all
        others = min(max(others, hidden if told else 0), max(0, capacity - sizes["free"] - held))
    sizes["others"] = others or None
    begins = _BEGINS.search(text)
    word = next(filter(None, begins.groups()), "") if begins is not None else ""
    backend = "cuda" if word in ("", "CUBLAS", "CUDNN") else word.lower()
    return DeviceFailure(
        **sizes,
        backend="mps" if text.startswith("Invalid buffer") else backend,
        device=_number(_DEVICE.search(text)),
        text=text[:800].strip(),
    )


def _bytes(match: re.Match[str] | None) -> int | None:
    """PyTorch's sizes count in 1024s, also where older versions write GB."""
    if match is None:
        return None
    number, unit = filter(None, match.groups())
    try:
        size = round(float(number) * 1024 ** "bkmgt".index(unit[0].lower()))
    except ValueError:
        return None
    return size if size < _LARGEST else None


def _number(match: re.Match[str] | None) -> int | None:
    """The number that a pattern found, in whichever group."""
    found = next((group for group in match.groups() if group is not None), None) if match is not None else None
    return int(re.sub("[,_]", "", found)) if found is not None else None


def _last(pattern: re.Pattern[str], text: str) -> int | None:
    return _number(max(pattern.finditer(text), key=re.Match.start, default=None))
