from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.analysis.oom_log import DeviceFailure, parse_message, read_log, read_text
from autockpt.errors import UsageError
from tests.analysis.logs import BACKWARD, FORWARD, OPTIMIZER, message, prefixed

MIB, GIB = 2**20, 2**30


def gib(number: float) -> int:
    return round(number * GIB)


def failure_of(text: str) -> DeviceFailure:
    failure = read_text(text).failure
    assert failure is not None
    return failure


def test_the_figures_of_a_message_and_the_place_of_its_stack() -> None:
    text = "world_size = 8\nstep 3\n" + FORWARD + message()
    assert read_text(text).world == 8
    failure = failure_of(text)
    assert failure.backend == "cuda" and failure.device == 0 and failure.rank is None
    assert (failure.tried, failure.capacity, failure.free) == (gib(1.96), gib(23.52), gib(1.10))
    assert (failure.allocated, failure.cached) == (gib(21.40), round(560.10 * MIB))
    assert failure.context == gib(22.41) - gib(21.40) - round(560.10 * MIB)
    assert failure.others is None
    assert (failure.stage, failure.at) == ("forward", "train.py:80")


def test_recomputing_within_backward() -> None:
    stack = BACKWARD + (
        '  File "/x/site-packages/torch/utils/checkpoint.py", line 1129, in unpack_hook\n'
        "    frame.recompute_fn(*args)\n"
        '  File "/x/site-packages/torch/utils/checkpoint.py", line 1527, in recompute_fn\n    fn(*args, **kwargs)\n'
    )
    assert failure_of(stack + message()).stage == "recompute"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (  # 1.x, before "reserved"
            "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB "
            "already allocated; 9.28 GiB free; 4.68 MiB cached)",
            {"tried": round(12.5 * MIB), "capacity": gib(10.92), "allocated": round(8.57 * MIB), "free": gib(9.28)}
            | {"cached": round(4.68 * MIB), "device": 0},
        ),
        (  # 2.1's spelling
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacty "
            "of 23.65 GiB of which 0 bytes is free. Of the allocated memory 22.90 GiB is allocated by PyTorch, and "
            "1.90 MiB is reserved by PyTorch but unallocated.",
            {"capacity": gib(23.65), "free": 0, "process": None, "others": None},
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
            "RuntimeError: XPU out of memory. Tried to allocate 1.71 GiB (GPU 0; 15.56 GiB total capacity; 176.00 MiB "
            "already allocated; 176.00 MiB reserved in total by PyTorch)",
            {"backend": "xpu", "allocated": 176 * MIB, "cached": 0, "free": None},
        ),
        (
            "RuntimeError: MPS backend out of memory (MPS allocated: 5.56 GB, other allocations: 1.10 GB, max allowed: "
            "6.80 GB). Tried to allocate 768.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to …",
            {"backend": "mps", "capacity": gib(6.80), "others": gib(1.10), "allocated": gib(5.56), "tried": 768 * MIB},
        ),
        ("RuntimeError: Invalid buffer size: 74.51 GiB", {"backend": "mps", "tried": gib(74.51)}),
        (
            "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently "
            "allocated     : 10.48 GiB\nRequested               : 21.81 GiB\nDevice limit            : 15.93 GiB\n"
            "Free (according to CUDA): 0 bytes",
            {"tried": gib(21.81), "allocated": gib(10.48), "capacity": gib(15.93), "free": 0, "device": 0},
        ),
    ],
)
def test_every_wording(text: str, want: dict[str, object]) -> None:
    assert {name: getattr(failure_of(text), name) for name in want} == want


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("[rank0]: ", 0),
        ("[default3]:", 3),
        ("[1,2]<stderr>: ", 2),
        ("(RayTrainWorker pid=45464, ip=10.0.0.7) ", None),
    ],
)
def test_what_launchers_and_loggers_write_in_front(prefix: str, rank: int | None) -> None:
    failure = failure_of(prefixed(BACKWARD + message(), prefix))
    assert (failure.rank, failure.stage, failure.tried, failure.at) == (rank, "backward", gib(1.96), "loop.py:41")


def test_interleaved_ranks_are_told_apart() -> None:
    first = prefixed(FORWARD + message(gpu=0), "[rank0]: ").splitlines()
    second = prefixed(OPTIMIZER + message(tried="3.00 GiB", gpu=1), "[rank1]: ").splitlines()
    lines = [line for pair in zip(first, second, strict=False) for line in pair] + first[len(second) :]
    reading = read_text("\n".join(lines))
    failure = reading.failure
    assert failure is not None and reading.ranks == (0, 1)
    assert (failure.rank, failure.device, failure.stage, failure.tried) in (
        (0, 0, "forward", gib(1.96)),
        (1, 1, "optimizer", 3 * GIB),
    )


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
    assert read_text(text).failure is None


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)",
        "RuntimeError: DataLoader worker (pid 164244) is killed by signal: Killed. ",
        "RuntimeError: unable to mmap 4976698672 bytes from file <model.safetensors>: Cannot allocate memory (12)",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "    Reason:       OOMKilled",
        "train.service: A process of this unit has been killed by the OOM killer.",
        "RuntimeError: DataLoader worker (pid 13176) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit.",
        "  exitcode  : -9 (pid: 907695)",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=77.0.",
    ],
)
def test_the_hosts_memory_is_told_from_the_devices(line: str) -> None:
    reading = read_text(f"loading data\n{line}\n")
    assert reading.failure is None and reading.host


def test_a_long_log_is_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autockpt.analysis.oom_log._MOST_READ", 1 << 20)
    log = tmp_path / "log.txt"
    noise = b"step loss lr\n" * 40_000
    with log.open("wb") as file:
        for _ in range(4):
            file.write(noise)
        file.write((FORWARD + message()).encode())
        file.write(noise)  # other ranks go on talking
    failure = read_log(log).failure
    assert failure is not None and failure.tried == gib(1.96) and failure.stage == "forward"


def test_a_log_without_one_says_what_it_ends_with(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text('Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: no such column')
    with pytest.raises(UsageError):
        read_log(log)
    with pytest.raises(UsageError):
        read_log(tmp_path / "absent.txt")


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a capacity of 23.64 GiB"


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        f"CUDA out of memory. Tried to allocate {'9' * 2_000_000} GiB.",
        f"{OOM}\n" * 18_000,
        "Error " * 300_000 + OOM,
        "".join(f"[rank{i}]: {OOM}\n" for i in range(18_000)),
    ],
    ids=["digits", "messages", "errors", "ranks"],
)
def test_hostile_logs_take_time_linear_in_their_length(text: str) -> None:
    # where it grows with the square, most of these would take hours
    failure = read_text(text).failure
    assert failure is None or failure.tried in (None, 20 * GIB)


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
    failure = failure_of(before + "\nRuntimeError: CUDA out of memory. Tried to allocate 1.00 GiB " + after)
    assert failure.tried is None or failure.tried >= 0
