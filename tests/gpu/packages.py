"""What the script needs beside this checkout: asked for at the start, by name, and taken from a folder of wheels.

Wheels are unpacked into a folder that comes before all others on the path; that takes a second where pip takes many,
and needs no pip. What is installed and new enough is used as it is, so PyTorch is never replaced.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from email.parser import HeaderParser
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


@dataclass
class Wanted:
    """``missing``: requirement by requirement, and who asks for it. ``wheels``: those to unpack, by name."""

    missing: dict[str, str] = field(default_factory=dict)
    wheels: dict[str, Path] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """What is missing and how to get it; empty where nothing is."""
        if not self.missing:
            return ""
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        names = " ".join(f"'{name}'" for name in self.missing)
        return (
            f"not here: {', '.join(f'{name} (for {by})' for name, by in self.missing.items())}.\nWhere there is a "
            f"network: python -m pip download --only-binary=:all: --python-version {version} "
            f"--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 -d WHEELS {names}\nthen here: --wheels "
            "WHEELS (torch and transformers have to be installed). results/gpu/README.md names all that a bare machine "
            "needs, for --no-deps: peft would bring PyTorch along"
        )


def requirements(more: Iterable[str]) -> list[str]:
    """This project's own, as pyproject.toml has them, and of those for its development the ones in ``more``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [text for text in project["optional-dependencies"]["dev"] if text.partition(">")[0] in more]
    return [*project["dependencies"], *asked]


def wanted(roots: Iterable[str], folder: Path | None) -> Wanted:
    """What has to come from the folder so that all requirements hold, and what is nowhere.

    Of several wheels the newest that fits this Python is taken. What installed packages ask for is taken from the
    folder where it is missing or too old, but not called missing where it is not there: builds of vendors ask for more
    than they need. Raises ImportError where the package `packaging` is not installed.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    there = _wheels(folder) if folder is not None else {}
    found = Wanted()
    pending: list[tuple[Any, str, bool]] = [(Requirement(text), "autockpt", True) for text in roots]
    seen: set[str] = set()
    while pending:
        asked, by, needed = pending.pop(0)
        name = canonicalize_name(asked.name)
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        have = None if name in found.wheels else _installed(name)
        if have is not None and asked.specifier.contains(have[0], prereleases=True):
            if name not in seen:
                seen.add(name)
                pending += [(Requirement(text), asked.name, False) for text in have[1]]
            continue
        version, path = there.get(name, (None, None))
        if path is None or not asked.specifier.contains(str(version), prereleases=True):
            if needed:
                found.missing.setdefault(f"{asked.name}{asked.specifier}", by)
        elif name not in found.wheels:
            found.wheels[name] = path
            pending += [(Requirement(text), asked.name, True) for text in _asked_by(path)]
    return found


def unpack(wheels: Mapping[str, Path], out: Path) -> Path:
    """The folder of these packages below ``out``; those that lie there already stay."""
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
    return target


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


def _installed(name: str) -> tuple[str, list[str]] | None:
    """Version, and what it asks for."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return found.version, found.requires or []


def _wheels(folder: Path) -> dict[str, tuple[Any, Path]]:
    """Version and file of the newest wheel of each name that fits this Python."""
    from packaging.tags import sys_tags
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    here, found = set(sys_tags()), {}
    for path in sorted(folder.glob("*.whl")):
        try:
            name, version, _, tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        if not here.isdisjoint(tags) and (name not in found or version > found[name][0]):
            found[name] = version, path
    return found


def _asked_by(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1)
        return HeaderParser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist") or []
