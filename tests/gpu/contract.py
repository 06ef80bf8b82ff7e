"""The project's own contract suite, on the device: in several processes, counted from what pytest writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.gpu.items import Context

FILES = (
    "tests/policies/test_architectures.py",
    "tests/policies/test_contract.py",
    "tests/policies/test_chunked_heads.py::test_two_steps_are_bit_equal",
)
ROOT = Path(__file__).resolve().parents[2]
SHOWN = 30


def contract(context: Context) -> dict[str, Any]:
    """Every policy, architecture, precision and dropout: gradients bit-equal with plain training."""
    shapes = context.shapes
    environment = dict(os.environ) | {"AUTOCKPT_TEST_DEVICE": shapes.device, "OMP_NUM_THREADS": "1"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # of what else is installed none is needed
    names = _collected(shapes.tests, environment)
    folder = context.out / "contract"
    folder.mkdir(parents=True, exist_ok=True)
    runs = []
    for number in range(shapes.processes):
        share = names[number * len(names) // shapes.processes : (number + 1) * len(names) // shapes.processes]
        if share:
            (folder / f"{number}.txt").write_text("\n".join(share))
            runs.append((number, len(share), _started(folder, number, environment)))
    found = {"tests": len(names), "passed": 0, "failed": 0, "skipped": 0, "lost": 0, "by": {}, "failures": []}
    for number, count, process in runs:
        process.wait()
        _add(found, folder / f"{number}.xml", count)
        context.keep(found)
    return found


def _pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]


def _collected(wanted: tuple[str, ...], environment: dict[str, str]) -> list[str]:
    chosen = ["-k", " or ".join(f"({name})" for name in wanted)] if wanted else []
    names: list[str] = []
    for quiet in ("-qq", "-q"):  # with -qq some versions of pytest count by file
        listed = subprocess.run(
            _pytest("--collect-only", quiet, "-o", "addopts=", *chosen, *FILES),
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        names = [line for line in listed.stdout.splitlines() if "::" in line]
        if names or listed.returncode:
            break
    if not names or listed.returncode:  # a file that cannot be imported has no tests
        raise RuntimeError(f"tests were not collected: {(listed.stdout + listed.stderr)[-500:]}")
    return names


def _started(folder: Path, number: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with (folder / f"{number}.log").open("wb") as log:
        return subprocess.Popen(
            _pytest("-q", f"--junitxml={folder / f'{number}.xml'}", f"@{folder / f'{number}.txt'}"),
            env=environment,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _add(found: dict[str, Any], report: Path, count: int) -> None:
    """Add what a process reported; tests of one that died are lost."""
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        cases = []
    found["lost"] += count - len(cases)
    for case in cases:
        group = found["by"].setdefault(_group(case), {"passed": 0, "failed": 0})
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        if bad is not None:
            found["failed"] += 1
            group["failed"] += 1
            if len(found["failures"]) < SHOWN:
                words = " ".join((bad.get("message") or "").split())[:200]
                found["failures"].append(f"{case.get('name')}: {words}")
        elif case.find("skipped") is not None:
            found["skipped"] += 1
        else:
            found["passed"] += 1
            group["passed"] += 1


def _group(case: ElementTree.Element) -> str:
    """What a test's gradients are compared under."""
    name = f"{case.get('classname')} {case.get('name')}"
    if "test_architectures" in name:
        return "dropout"  # each with and without
    return "autocast" if "bf16" in name or "autocast" in name else "fp32"
