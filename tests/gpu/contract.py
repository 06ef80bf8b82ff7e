"""The project's own contract suite, on the device: in several processes, counted from what pytest writes."""

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
    "tests/policies/test_chunked_heads.py::test_two_steps",
)
ROOT = Path(__file__).resolve().parents[2]
SHOWN = 30


def contract(context: Context) -> dict[str, Any]:
    """Every policy, architecture, precision and dropout: gradients bit-equal with plain training."""
    shapes, report, log = context.shapes, context.out / "contract.xml", context.out / "contract.log"
    environment = os.environ | {"AUTOCKPT_TEST_DEVICE": shapes.device, "OMP_NUM_THREADS": "1"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # of what else is installed none is needed
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist"]
    command += ["-n", str(shapes.processes), f"--junitxml={report}", *FILES]
    command += ["-k", " or ".join(f"({name})" for name in shapes.tests)] if shapes.tests else []
    with log.open("w") as output:
        ran = subprocess.run(command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    if ran.returncode not in (0, 1):  # a file that cannot be imported has no tests
        raise RuntimeError(f"no test ran: {log.read_text()[-500:]}")
    found = {"tests": 0, "passed": 0, "failed": 0, "skipped": 0, "by": {}, "failures": []}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        word = "failed" if bad is not None else "skipped" if case.find("skipped") is not None else "passed"
        group = found["by"].setdefault(_group(case), {"passed": 0, "failed": 0, "skipped": 0})
        for counts in (found, group):
            counts[word] += 1
        found["tests"] += 1
        if bad is not None and len(found["failures"]) < SHOWN:
            found["failures"].append(f"{case.get('name')}: {' '.join((bad.get('message') or '').split())[:200]}")
    return found


def _group(case: ElementTree.Element) -> str:
    """What a test's gradients are compared under."""
    name = f"{case.get('classname')} {case.get('name')}"
    if "test_architectures" in name:
        return "dropout"  # each with and without
    return "autocast" if "bf16" in name or "autocast" in name else "fp32"
