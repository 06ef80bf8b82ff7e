from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.diagnose.oom_log import parse_message, read_log, read_text
from autockpt.errors import UsageError
from tests.diagnose.logs import BACKWARD, FORWARD, LOSS, MODELING, OPTIMIZER, message, prefixed
from tests.diagnose.origins import LOGS

MIB, GIB = 2**20, 2**30


def gib(number: float) -> int:
    return round(number * GIB)


def test_the_figures_of_a_message_and_the_place_of_its_stack() -> None:
    (failure,) = read_text("step 3\n" + FORWARD + message()).failures
    assert failure.backend == "cuda" and failure.device == 0 and failure.rank is None
    assert (failure.tried, failure.capacity, failure.free) == (gib(1.96), gib(23.52), gib(1.10))
    assert (failure.allocated, failure.cached) == (gib(21.40), round(560.10 * MIB))
    assert failure.overhead == gib(22.41) - gib(21.40) - round(560.10 * MIB)
    assert failure.others is None
    assert failure.place.stage == "forward"
    assert failure.place.calls == ("model", "decoder_layer", "mlp", "down_proj")
    assert failure.place.model is not None and failure.place.model.file == MODELING and failure.place.model.line == 155
    assert failure.place.user is not None and (failure.place.user.file, failure.place.user.line) == (
        "/home/me/train.py",
        80,
    )


@pytest.mark.parametrize(
    ("stack", "stage"), [(FORWARD, "forward"), (LOSS, "loss"), (BACKWARD, "backward"), (OPTIMIZER, "optimizer")]
)
def test_stages_are_told_apart(stack: str, stage: str) -> None:
    assert read_text(stack + message()).failures[0].place.stage == stage


def test_recomputing_within_backward() -> None:
    stack = BACKWARD + (
        '  File "/x/site-packages/torch/utils/checkpoint.py", line 1129, in unpack_hook\n'
        "    frame.recompute_fn(*args)\n"
        '  File "/x/site-packages/torch/utils/checkpoint.py", line 1527, in recompute_fn\n    fn(*args, **kwargs)\n'
    )
    assert read_text(stack + message()).failures[0].place.stage == "recompute"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (  # 1.x, before "reserved"
            "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB "
            "already allocated; 9.28 GiB free; 4.68 MiB cached)",
            {"tried": round(12.5 * MIB), "capacity": gib(10.92), "allocated": round(8.57 * MIB), "free": gib(9.28)}
            | {"cached": round(4.68 * MIB), "device": 0},
        ),
        (
            "RuntimeError: CUDA out of memory. Tried to allocate 2.26 GiB (GPU 1; 6.00 GiB total capacity; 781.59 MiB "
            "already allocated; 3.03 GiB free; 1.24 GiB reserved in total by PyTorch) If reserved memory is >> …",
            {"capacity": 6 * GIB, "device": 1, "cached": gib(1.24) - round(781.59 * MIB)},
        ),
        (  # 2.1's spelling
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacty "
            "of 23.65 GiB of which 0 bytes is free. Of the allocated memory 22.90 GiB is allocated by PyTorch, and "
            "1.90 MiB is reserved by PyTorch but unallocated.",
            {"capacity": gib(23.65), "free": 0, "process": None, "others": None},
        ),
        (  # in a container a process does not know its own number
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 7.28 GiB. GPU 0 has a total capacity of 47.53 GiB "
            "of which 3.93 GiB is free. Process 3121620 has 43.59 GiB memory in use. Of the allocated memory 38.33 GiB "
            "is allocated by PyTorch, and 4.95 GiB is reserved by PyTorch but unallocated.",
            {"process": gib(43.59), "others": None, "allocated": gib(38.33)},
        ),
        (
            "CUDA out of memory. Tried to allocate 4.50 GiB. GPU 0 has a total capacty of 23.69 GiB of which 3.19 GiB "
            "is free. Process 2006998 has 256.00 MiB memory in use. Including non-PyTorch memory, this process has "
            "20.23 GiB memory in use. Of the allocated memory 19.90 GiB is allocated by PyTorch, and 32.75 MiB is "
            "reserved by PyTorch but unallocated.",
            {"process": gib(20.23), "others": gib(23.69) - gib(3.19) - gib(20.23)},
        ),
        (  # an unsigned difference that wrapped around
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 768.00 MiB. GPU 0 has a total capacity of "
            "31.84 GiB of which 0 bytes is free. Including non-PyTorch memory, this process has 17179869184.00 GiB "
            "memory in use. Of the allocated memory 52.93 GiB is allocated by PyTorch, and 32.88 MiB is reserved by "
            "PyTorch but unallocated.",
            {"process": None, "allocated": gib(52.93)},
        ),
        (  # with throw_on_cudamalloc_oom among the allocator's settings
            "torch.OutOfMemoryError: CUDA out of memory. Allocation was preemptively rejected because it would exceed "
            "per_process_memory_fraction limit. Requested size: 1.50 GiB",
            {"backend": "cuda", "tried": gib(1.5), "allocated": None},
        ),
        (
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 4.50 GiB. GPU 2 has a total capacity of "
            "15.98 GiB of which 1.40 GiB is free. Of the allocated memory 1.26 GiB is allocated by PyTorch, and 152.50 "
            "MiB is reserved by PyTorch but unallocated.",
            {"backend": "hip", "device": 2, "free": gib(1.40)},
        ),
        (
            "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 8.11 GiB. GPU 0 has a total capacity of "
            "16.54 GiB of which 16.54 GiB is free. 8.27 GiB allowed; Of the allocated memory 0 bytes is allocated by "
            "PyTorch, and 0 bytes is reserved by PyTorch but unallocated.",
            {"backend": "xpu", "allowed": gib(8.27), "allocated": 0},
        ),
        (
            "RuntimeError: XPU out of memory. Tried to allocate 1.71 GiB (GPU 0; 15.56 GiB total capacity; 176.00 MiB "
            "already allocated; 176.00 MiB reserved in total by PyTorch)",
            {"backend": "xpu", "allocated": 176 * MIB, "cached": 0, "free": None},
        ),
        (
            "RuntimeError: MPS backend out of memory (MPS allocated: 5.56 GB, other allocations: 1.10 GB, max allowed: "
            "6.80 GB). Tried to allocate 768.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to …",
            {"backend": "mps", "capacity": gib(6.80), "others": gib(1.10), "allocated": gib(5.56), "tried": 768 * MIB},
        ),
    ],
)
def test_every_wording(text: str, want: dict[str, object]) -> None:
    (failure,) = read_text(text).failures
    assert {name: getattr(failure, name) for name in want} == want


@pytest.mark.parametrize("origin", LOGS)
def test_logs_of_many_origins(origin: str) -> None:
    text, of_failure, of_reading = LOGS[origin]
    reading = read_text(text)
    failure = reading.failures[0]
    found = {name: failure.place.stage if name == "stage" else getattr(failure, name) for name in of_failure}
    assert found == of_failure
    assert {name: getattr(reading, name) for name in of_reading} == of_reading


def test_a_message_that_a_terminal_wrapped() -> None:
    wrapped = textwrap.fill(message(), 60)
    assert read_text(FORWARD + wrapped).failures[0].tried == gib(1.96)


def test_colours_and_progress_bars_do_not_hide_a_message() -> None:
    text = "\x1b[31m" + (FORWARD + message()).replace("Tried", "\x1b[1mTried\x1b[0m")
    (failure,) = read_text("  3%|▎  | 3/100\r  4%|▍  | 4/100\r" + text).failures
    assert failure.tried == gib(1.96) and failure.place.stage == "forward"


def test_interleaved_ranks_are_told_apart() -> None:
    first = prefixed(FORWARD + message(gpu=0), "[rank0]: ").splitlines()
    second = prefixed(OPTIMIZER + message(tried="3.00 GiB", gpu=1), "[rank1]: ").splitlines()
    lines = [line for pair in zip(first, second, strict=False) for line in pair] + first[len(second) :]
    reading = read_text("\n".join(lines))
    assert [(f.rank, f.device, f.place.stage) for f in reading.failures] == [(0, 0, "forward"), (1, 1, "optimizer")]
    assert reading.failures[1].tried == 3 * GIB and "rank 1" in reading.notes[0]


def test_a_message_that_is_printed_again_without_its_stack_counts_once() -> None:
    text = prefixed(FORWARD + message(), "[rank0]: ") + "\nfailed with: " + message()
    (failure,) = read_text(text).failures
    assert failure.rank == 0 and failure.place.stage == "forward"


def test_of_several_failures_the_last_counts() -> None:
    text = FORWARD + message(tried="4.00 GiB") + "retrying with batch size 2\n" + BACKWARD + message(tried="2.00 GiB")
    reading = read_text(text)
    assert reading.count == 2
    assert reading.failures[0].tried == 2 * GIB and reading.failures[0].place.stage == "backward"


def test_ipython_and_rich_stacks() -> None:
    ipython = (
        "Traceback (most recent call last)\n"
        "File /x/site-packages/transformers/models/gpt2/modeling_gpt2.py:310, in GPT2MLP.forward(self, x)\n"
        "    308 def forward(self, x):\n--> 310     x = self.c_fc(x)\n"
    )
    rich = (
        "╭──── Traceback (most recent call last) ────╮\n"
        "│ /home/me/net.py:12 in forward              │\n"
        "│   11 │   # widen                           │\n"
        "│ ❱ 12 │   return self.widen(x)              │\n╰──╯\n"
    )
    old = (
        "Traceback (most recent call last)\n"
        "/usr/local/lib/python3.11/dist-packages/torch/nn/modules/module.py in _call_impl(self, *args)\n"
        "-> 1750             return forward_call(*args, **kwargs)\n"
        "/content/net.py in forward(self, x)\n---> 7         return self.widen(x)\n"
    )
    for text, name in ((ipython, "c_fc"), (rich, "widen"), (old, "widen")):
        place = read_text(text + message()).failures[0].place
        assert place.stage == "forward" and place.calls == (name,), text


def test_errors_of_libraries_without_figures() -> None:
    reading = read_text("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\n")
    assert reading.failures[0].tried is None and reading.failures[0].backend == "cuda"
    assert read_text("RuntimeError: CUDA error: out of memory\n").failures[0].allocated is None


@pytest.mark.parametrize(
    "text",
    [
        "except torch.cuda.OutOfMemoryError:\n    print('CUDA out of memory')\n",
        "hint: when CUDA is out of memory, lower the batch size\n",
        "If you see CUDA out of memory errors, set --low_memory\n",
        "",
    ],
)
def test_talk_of_it_is_no_failure(text: str) -> None:
    assert not read_text(text).failures


@pytest.mark.parametrize(
    ("line", "kind", "tried"),
    [
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
         "tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)", "allocator", 64 * GIB),
        ("RuntimeError: DataLoader worker (pid 164244) is killed by signal: Killed. ", "worker", None),
        ("RuntimeError: unable to mmap 4976698672 bytes from file <model.safetensors>: Cannot allocate memory (12)",
         "allocator", 4976698672),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "allocator", None),
        ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", "killed", None),
        ("    Reason:       OOMKilled", "killed", None),
        ("train.service: A process of this unit has been killed by the OOM killer.", "killed", None),
        ("RuntimeError: DataLoader worker (pid 13176) is killed by signal: Bus error. It is possible that dataloader's "
         "workers are out of shared memory. Please try to raise your shared memory limit.", "shared_memory", None),
        ("  exitcode  : -9 (pid: 907695)", "killed", None),
        ("  traceback : Signal 9 (SIGKILL) received by PID 907695", "killed", None),
        ("/bin/bash: line 3:  4121 Killed                  python train.py", "killed", None),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=77.0.", "killed", None),
        ("numpy.core._exceptions._ArrayMemoryError: Unable to allocate 2.00 GiB for an array", "allocator", 2 * GIB),
    ],
)  # fmt: skip
def test_the_hosts_memory_is_told_from_the_devices(line: str, kind: str, tried: int | None) -> None:
    reading = read_text(f"loading data\n{line}\n")
    assert not reading.failures and reading.host is not None
    assert (reading.host.kind, reading.host.tried) == (kind, tried)


def test_a_device_out_of_memory_comes_before_the_signals_that_follow_it() -> None:
    reading = read_text(FORWARD + message() + "torchrun: Signal 9 (SIGKILL) received by PID 12\n")
    assert reading.failures and reading.host is None


def test_a_long_log_is_read_from_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    noise = b"step loss lr\n" * 400_000
    with log.open("wb") as file:
        for _ in range(4):
            file.write(noise)
        file.write((FORWARD + message()).encode())
        file.write(noise)  # other ranks go on talking
    (failure,) = read_log(log).failures
    assert failure.tried == gib(1.96) and failure.place.stage == "forward"


def test_a_log_from_powershell(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(b"\xff\xfe" + (FORWARD + message()).encode("utf-16-le"))
    assert read_log(log).failures[0].tried == gib(1.96)


def test_a_run_that_outlived_the_device_and_was_killed_later(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(FORWARD + message() + "fine again\n" * 100_000 + "exitcode: -9 (pid 3)\n")
    reading = read_log(log)
    assert reading.host is not None and reading.host.kind == "killed"


def test_a_log_without_one_says_what_it_ends_with(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text('Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: no such column')
    with pytest.raises(UsageError, match="it ends with ValueError: no such column"):
        read_log(log)
    with pytest.raises(UsageError, match="cannot be read"):
        read_log(tmp_path / "absent.txt")


@pytest.mark.parametrize(
    ("named", "own", "others"),
    [
        ((54.0, 25.0), None, 25.0),  # a container: both have numbers that nobody here knows
        ((25.0, 54.0), 54.1, 25.0),  # it knows its memory, and comes again by another number
        ((54.0,), 54.0, None),
        ((20.0,), 54.0, 25.0),  # another's indeed: what nobody names is hidden
    ],
)
def test_ones_own_process_is_not_among_the_others(
    named: tuple[float, ...], own: float | None, others: float | None
) -> None:
    used = 79.2 if others else 54.1
    text = (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of {used}"
    )
    text += " GiB of which 20.00 MiB is free. "
    text += "".join(f"Process {i} has {size:.2f} GiB memory in use. " for i, size in enumerate(named))
    text += f"Including non-PyTorch memory, this process has {own:.2f} GiB memory in use. " if own else ""
    text += "Of the allocated memory 52.00 GiB is allocated by PyTorch, "
    text += "and 1.20 GiB is reserved by PyTorch but unallocated."
    (failure,) = read_text(text).failures
    assert failure.process == gib(own or 54.0)
    assert (failure.others or 0) == pytest.approx(gib(others or 0), rel=0.02)


def test_the_zero_stage_is_read_from_where_the_run_began(tmp_path: Path) -> None:
    log = tmp_path / "log"
    said = '    "zero_optimization": {\n        "stage": 3,\n    }\n'
    log.write_text(said + "step loss\n" * 400_000 + FORWARD + message())
    assert read_log(log).zero_stage == 3
    assert read_text("  zero_optimization_stage ...... 2\n").zero_stage == 2
    assert read_text("stage 3 of 5\n" + FORWARD + message()).zero_stage is None


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a capacity of 23.64 GiB"


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        f"CUDA out of memory. Tried to allocate {'9' * 2_000_000} GiB.",
        f"{OOM}\n" * 18_000,
        "Error " * 300_000 + OOM,
        f"--> 1 x{' ' * 2_000_000}y\n{OOM}",
        f'  File "a.py", line 1, in f{" " * 2_000_000}g\n{OOM}',
        "".join(f"[rank{i}]: {OOM}\n" for i in range(18_000)),
    ],
    ids=["digits", "messages", "errors", "arrow", "frame", "ranks"],
)
def test_hostile_logs_take_time_linear_in_their_length(text: str) -> None:
    # where it grows with the square, most of these would take hours
    reading = read_text(text)
    assert all(f.tried is None or f.tried == 20 * GIB for f in reading.failures) and len(reading.notes) <= 1
    assert sum(map(len, reading.notes)) < 400


SIZES = st.integers(1, 2**40 - 1)


@given(tried=SIZES, rest=SIZES, allocated=SIZES, cached=SIZES)
@settings(max_examples=60, deadline=None)
def test_figures_survive_to_the_digits_that_a_message_has(tried: int, rest: int, allocated: int, cached: int) -> None:
    capacity = allocated + cached + rest

    def said(size: int) -> str:  # c10's format_size
        for bound, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
            if size >= bound:
                return f"{size / bound:.2f} {name}"
        return f"{size} bytes"

    found = parse_message(message(said(tried), said(capacity), allocated=said(allocated), cached=said(cached)))
    for name, size in (("tried", tried), ("capacity", capacity), ("allocated", allocated), ("cached", cached)):
        assert abs(getattr(found, name) - size) <= 0.006 * max(1024, size), name


@given(st.text(max_size=400), st.text(max_size=100))
@settings(max_examples=150, deadline=None)
def test_no_text_breaks_the_reader(before: str, after: str) -> None:
    read_text(before)
    reading = read_text(before + "\nRuntimeError: CUDA out of memory. Tried to allocate 1.00 GiB " + after)
    assert all(f.tried is None or f.tried >= 0 for f in reading.failures)
