"""Logs of many origins, as launchers, loggers, containers and other accelerators leave them, with the right values.

Shapes and wordings are those of public reports; paths, hosts and times are made up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from tests.diagnose.logs import BACKWARD, FORWARD, OPTIMIZER, message, prefixed

GIB, MIB = 2**30, 2**20

_GAUDI = """Traceback (most recent call last):
  File "/root/run_qa.py", line 635, in main
    train_result = trainer.train(resume_from_checkpoint=checkpoint)
  File "/usr/local/lib/python3.8/dist-packages/torch/_tensor.py", line 307, in backward
    torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)
"""
_SUMMARY = """============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-03-01_10:00:00
  host      : node-1
  rank      : 5 (local_rank: 1)
  exitcode  : 1 (pid: 4711)
  error_file: <N/A>
============================================================
"""


def _async(name: str) -> str:
    return (
        f"{name}: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 10.48 GiB\nRequested               : 21.81 GiB\n"
        "Device limit            : 15.93 GiB\nFree (according to CUDA): 0 bytes\n"
        "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB\n"
    )


def _numbered(text: str, make: Callable[[int], str]) -> str:
    return "".join(f"{make(i)}{line}\n" for i, line in enumerate(text.splitlines()))


def _docker(text: str) -> str:
    records = ({"log": f"{line}\n", "stream": "stderr", "time": "2026-03-01T10:00:00Z"} for line in text.splitlines())
    return "".join(f"{json.dumps(record)}\n" for record in records)


def _mixed(first: str, second: str) -> str:
    lines = zip(first.splitlines(), second.splitlines(), strict=False)
    return "\n".join(line for pair in lines for line in pair) + "\n"


# what stands in front of every line, by the line's number
PREFIXES: dict[str, Callable[[int], str]] = {
    "pdsh, a host": lambda i: "node-3: ",
    "pdsh, an address": lambda i: "192.168.0.6: ",
    "torchrun": lambda i: "[rank0]: ",
    "torchrun of old": lambda i: "[default0]:",
    "srun --label": lambda i: "0: ",
    "mpirun --tag-output": lambda i: "[1,0]<stderr>: ",
    "mpirun and torchrun": lambda i: "[0] [rank0]: ",
    "Ray": lambda i: "(RayTrainWorker pid=45464, ip=10.0.0.7) ",
    "Ray and a logger": lambda i: f"(WorkerWrapper pid=45464) ERROR 06-09 06:57:{10 + i % 50} worker_base.py:581] ",
    "a logger": lambda i: f"[Stage-0] ERROR 03-23 04:09:{10 + i % 50} [worker.py:430] ",
    "python's logging": lambda i: f"2026-03-01 10:00:{10 + i % 50},{i:03} - trainer - ERROR - ",
    "loguru": lambda i: f"2026-03-01 10:00:00.{i:03} | ERROR    | __main__:run:31 - ",
    "glog": lambda i: f"E0301 10:00:00.{100000 + i} 4711 train.py:31] ",
    "kubernetes": lambda i: f"2026-03-01T10:00:00.{100000000 + i}Z stderr F ",
    "kubectl": lambda i: "[pod/train-0/pytorch] ",
    "docker compose": lambda i: "trainer-1  | ",
    "syslog": lambda i: f"Mar  1 10:00:{10 + i % 50} gpu-box train[4711]: ",
    "seconds since the start": lambda i: f"[{i:5}.{i:06}] ",
    "epoch seconds": lambda i: f"{1772359200 + i} worker0 ",
    "a time only": lambda i: f"[10:0{i % 10}] ",
    "numbered lines": lambda i: f"{i}> ",
    "an address with a port": lambda i: "10.0.0.7:29500 ",
    "GitHub Actions": lambda i: f"train\tRun\t2026-03-01T10:00:00.{1000000 + i}Z ",
}

# name, text, values of the first failure, and of the reading
LOGS: dict[str, tuple[str, Mapping[str, object], Mapping[str, object]]] = {
    "npu behind Ray": (
        prefixed(
            "Traceback (most recent call last):\n"
            '  File "/usr/local/python3.10.17/lib/python3.10/site-packages/torch/utils/_device.py", line 106, in '
            "__torch_function__ [repeated 6x across cluster]\n"
            "RuntimeError: NPU out of memory. Tried to allocate 30.00 MiB (NPU 3; 60.96 GiB total capacity; 60.34 GiB "
            "already allocated; 60.34 GiB current active; 14.24 MiB free; 60.60 GiB reserved in total by PyTorch) If "
            "reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation. [repeated "
            "6x across cluster]",
            "(NPURayWorkerWrapper pid=45464) ERROR 06-09 06:57:48 worker_base.py:581] ",
        ),
        {"backend": "npu", "device": 3, "tried": 30 * MIB, "free": round(14.24 * MIB)}
        | {"allocated": round(60.34 * GIB), "cached": round(60.60 * GIB) - round(60.34 * GIB)},
        {},
    ),
    "gaudi, lazy mode": (
        _GAUDI + "RuntimeError: [Rank:5] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::268435456 (256)MB",
        {"backend": "hpu", "rank": 5, "tried": 256 * MIB, "allocated": None, "stage": "backward"},
        {},
    ),
    "gaudi, workspace": (
        _GAUDI + "RuntimeError: FATAL ERROR :: MODULE:SYNHELPER workspace Allocation of size ::14493510400 failed!",
        {"backend": "hpu", "tried": 14493510400, "stage": "backward"},
        {},
    ),
    "cudaMallocAsync": (
        BACKWARD + _async("torch.OutOfMemoryError"),
        {"tried": round(21.81 * GIB), "allocated": round(10.48 * GIB), "capacity": round(15.93 * GIB), "free": 0}
        | {"allowed": None, "device": 0, "stage": "backward", "cached": None},
        {},
    ),
    "cudaMallocAsync behind torchrun": (
        prefixed(BACKWARD + _async("torch.OutOfMemoryError"), "[rank1]: "),
        {"rank": 1, "tried": round(21.81 * GIB), "allowed": None, "capacity": round(15.93 * GIB)},
        {},
    ),
    "cudaMallocAsync in a line, with a limit": (
        "OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory) Currently allocated : "
        "12.20 GiB Requested : 1.88 GiB Device limit : 16.00 GiB Free (according to CUDA): 2.00 GiB PyTorch limit (set "
        "by user-supplied memory fraction) : 14.00 GiB",
        {"allocated": round(12.2 * GIB), "tried": round(1.88 * GIB), "allowed": 14 * GIB},
        {},
    ),
    "cudaMallocAsync without figures": ("torch.OutOfMemoryError: Allocation on device \n", {"tried": None}, {}),
    "Metal, one buffer": (
        "RuntimeError: Invalid buffer size: 74.51 GiB\n",
        {"backend": "mps", "tried": round(74.51 * GIB)},
        {},
    ),
    "a driver's error": ("RuntimeError: CUDA driver error: out of memory\n", {"backend": "cuda", "tried": None}, {}),
    "an accelerator's error": ("torch.AcceleratorError: HIP error: out of memory\n", {"backend": "hip"}, {}),
    "Intel's runtime": (
        "RuntimeError: Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)\n",
        {"backend": "xpu"},
        {},
    ),
    "bitsandbytes": (
        "RuntimeError: Error out of memory at line 380 in file /mmfs1/csrc/pythonInterface.c\n",
        {"backend": "cuda"},
        {},
    ),
    "somebody's own backend": (
        "RuntimeError: MUSA out of memory. Tried to allocate 2.00 GiB (GPU 1; 48.00 GiB total capacity; 40.00 GiB "
        "already allocated; 1.00 GiB free; 44.00 GiB reserved in total by PyTorch)\n",
        {"backend": "other", "tried": 2 * GIB, "device": 1, "cached": 4 * GIB, "free": GIB},
        {},
    ),
    "a container whose driver counts nothing": (
        FORWARD + message(tried="130.00 MiB", capacity="79.10 GiB", free="12.81 MiB", process="0 bytes")
        .replace("21.40 GiB", "10.47 GiB").replace("560.10 MiB", "93.52 MiB"),
        {"process": None, "others": round(79.10 * GIB) - round(12.81 * MIB) - round(10.47 * GIB) - round(93.52 * MIB)},
        {},
    ),
    "Windows, more than the card has": (
        'Traceback (most recent call last):\n  File "C:\\sd\\train.py", line 3, in <module>\n    loss.backward()\n'
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.73 GiB (GPU 0; 8.00 GiB total capacity; "
        "17.20 GiB already allocated; 0 bytes free; 19.15 GiB reserved in total by PyTorch)\n",
        {"allocated": round(17.20 * GIB), "cached": None, "reserved": 8 * GIB, "overhead": None, "stage": "backward"},
        {"can_expand": False},
    ),
    "frees that are none": (
        message(free="17179869184.00 GiB").replace("this process has 22.41 GiB", "this process has 99.00 GiB"),
        {"free": None, "process": None, "others": None},
        {},
    ),
    "more free than there is room for": (message(free="23.00 GiB"), {"free": None, "allocated": round(21.4 * GIB)}, {}),
    "a fraction that the process has": (
        message(process="22.41 GiB").replace("Of the", "22.00 GiB allowed; Of the"),
        {"allowed": 22 * GIB},
        {},
    ),
    "torchrun's summary": (
        "W0301 10:00:00.000000 4711 run.py:774] world_size = 8\n" + FORWARD + message(gpu=1) + _SUMMARY,
        {"rank": 5, "device": 1, "stage": "forward"},
        {"world": 8},
    ),
    "two ranks, the second was first": (
        _mixed(
            prefixed(FORWARD + message(gpu=0), "[rank4]: "), prefixed(FORWARD + message(gpu=1), "[rank5]: ")
        )
        + _SUMMARY,
        {"rank": 5, "device": 1, "stage": "forward"},
        {},
    ),
    "hosts and times mixed": (
        _mixed(
            _numbered(BACKWARD + message(tried="3.00 GiB"), lambda i: f"2026-03-01T10:00:{10 + i % 9}Z node-1: "),
            _numbered(OPTIMIZER + message(gpu=1), lambda i: f"2026-03-01T10:00:{30 + i % 9}Z node-2: "),
        ),
        {"device": 0, "stage": "backward", "tried": 3 * GIB},
        {},
    ),
    "Docker's JSON": (_docker(FORWARD + message()), {"stage": "forward", "device": 0}, {}),
    "PEFT and accelerate": (
        "Distributed environment: MULTI_GPU  Backend: nccl\nNum processes: 4\nProcess index: 2\n"
        "trainable params: 20,971,520 || all params: 8,051,232,768 || trainable%: 0.2605\n" + FORWARD + message(),
        {"stage": "forward"},
        {"world": 4, "total_params": 8_051_232_768, "trainable_params": 20_971_520},
    ),
    "PEFT of old, the other way round": (
        "all params: 6611816448 || trainable params: 4194304\n" + FORWARD + message(),
        {},
        {"total_params": 6_611_816_448, "trainable_params": 4_194_304, "world": None},
    ),
    "Lightning": (
        "Initializing distributed: GLOBAL_RANK: 1, MEMBER: 2/16\n" + FORWARD + message(),
        {},
        {"world": 16},
    ),
}  # fmt: skip
