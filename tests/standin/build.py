"""Compile the stand-in, once for each user, PyTorch and version of the source; see ``tests.standin``.

python -m tests.standin.build      # build now, and say where it is and how long it took
"""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")
ROOT = SOURCE.parents[2]
_METADATA = "Metadata-Version: 2.1\nName: standin\nVersion: 0\n"
_ENTRY_POINT = "[torch.backends]\nstandin = tests.standin.module:register\n"


class CannotBuild(Exception):
    """Why there is no stand-in here."""


@functools.cache
def folder() -> Path:
    """The built extension and the entry point, built where it is not there yet. Raises CannotBuild."""
    from torch.utils import cpp_extension

    question = "\n".join([SOURCE.read_text(), torch.__version__, sys.version, _ENTRY_POINT])
    name = f"autockpt_standin_{hashlib.sha256(question.encode()).hexdigest()[:12]}"
    place = Path(cpp_extension.get_default_build_root(), name)
    place.mkdir(parents=True, exist_ok=True)
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may come here at once
        if not (place / "standin_device.so").exists():
            _compile(place)
    return place


def _compile(place: Path) -> None:
    from torch.utils import cpp_extension

    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise CannotBuild("there is no C++ compiler (c++, or what CXX names)")
    python = sysconfig.get_paths()["include"]
    if not Path(python, "Python.h").exists():
        raise CannotBuild(f"Python's own headers are not in {python}")
    command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", "-w", "-DTORCH_EXTENSION_NAME=standin_device"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    command += [f"-I{path}" for path in (*cpp_extension.include_paths(), python)]
    command += [str(SOURCE), *(f"-L{path}" for path in cpp_extension.library_paths())]
    command += ["-ltorch", "-ltorch_cpu", "-lc10", "-o", str(place / "unfinished.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise CannotBuild("\n".join(["the compiler refuses:", *(errors or done.stderr.splitlines())[:10]]))
    entry = place / "standin-0.dist-info"
    entry.mkdir(exist_ok=True)
    (entry / "METADATA").write_text(_METADATA)
    (entry / "entry_points.txt").write_text(_ENTRY_POINT)
    (place / "unfinished.so").rename(place / "standin_device.so")


def environment(schedule: str, report: Path, **more: str) -> dict[str, str]:
    """For processes that shall have the device.

    ``schedule`` is eager, lazy, compute-late, copies-late, or random with a seed behind a colon. Races, and that the
    device was opened, are written to the file ``report`` as they are found. Raises CannotBuild.
    """
    path = os.pathsep.join([str(folder()), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    told = {"STANDIN_SCHEDULE": schedule, "STANDIN_REPORT": str(report)}
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | told | more


if __name__ == "__main__":
    start = time.monotonic()
    print(f"{folder()} ({time.monotonic() - start:.0f} s)")
