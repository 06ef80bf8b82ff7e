"""Packages that a bare machine lacks: unpacked from a folder of wheels, in a second and without pip.

They go into a folder that comes before all others on the path. The folder of wheels must hold no PyTorch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "packages"
TESTS, LORA = ("pytest", "hypothesis"), ("peft",)  # for the contract suite, for jobs with LoRA
MODULES = (
    *("torch", "transformers.models.llama.modeling_llama", "scipy.special", "optuna", "pydantic", "typer", "rich"),
    *("yaml", "jinja2", "autockpt.cli.app", "autockpt.measuring", "autockpt.tracing", "tests.gpu.jobs"),
)
_IMPORTS = """
import importlib, json, sys
found = {"missing": {}, "devices": 0, "name": ""}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        found["missing"][name] = f"{name} ({type(error).__name__}: {error})"
if "torch" not in found["missing"]:
    import torch
    found |= {"torch": torch.__version__, "devices": torch.cuda.device_count()}
    if found["devices"]:
        found["name"] = torch.cuda.get_device_name(0)
        torch.ones(16, 16, device="cuda").mm(torch.ones(16, 16, device="cuda")).cpu()
print(json.dumps(found))
"""


def unpack(folder: Path | None, out: Path) -> tuple[Path, list[str]]:
    """The folder of these packages below ``out``, and which there are; those that lie there already stay."""
    wheels = _wheels(folder) if folder is not None else {}
    target = out / FOLDER / f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in wheels.values():
        mark = target / f".{path.name}"
        if mark.exists():
            continue
        target.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path) as wheel:
            for member in wheel.infolist():
                place = member.filename.split("/", 2)
                if place[0].endswith(".data"):  # scripts and headers are not needed, libraries lie one level deeper
                    if len(place) < 3 or place[1] not in ("purelib", "platlib"):
                        continue
                    member.filename = place[2]
                wheel.extract(member, target)
        mark.touch()
    return target, [path.name for path in wheels.values()]


def warmed(environment: Mapping[str, str], more: Iterable[str]) -> dict[str, Any]:
    """Import everything once in a process of its own: what is ``missing`` and why, the GPUs, the ``seconds`` it took.

    The first import from a cold disk takes many times what later ones do, and should not be part of an item's time.
    """
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", _IMPORTS, *MODULES, *more],
        env=dict(environment),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    try:
        found = json.loads(ran.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = [line for line in ran.stderr.splitlines() if line.strip()]
        found = {"missing": {"": f"a process that imports everything: {''.join(said[-1:]) or ran.returncode}"}}
    return found | {"seconds": round(time.monotonic() - began, 1)}


def _wheels(folder: Path) -> dict[str, Path]:
    """The newest wheel of each name that fits this Python."""
    from packaging.tags import sys_tags
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    here, found = set(sys_tags()), dict[str, tuple[Any, Path]]()
    for path in sorted(folder.glob("*.whl")):
        try:
            name, version, _, tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        if not here.isdisjoint(tags) and (name not in found or version > found[name][0]):
            found[name] = version, path
    return {name: path for name, (_, path) in found.items()}
