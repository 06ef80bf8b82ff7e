"""Part 3: the card's own hardware description beside the built-in one."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.gpu.items import Context


def calibrate(context: Context) -> dict[str, Any]:
    """``autockpt calibrate``, as a user would call it."""
    command = [sys.executable, "-m", "autockpt", "calibrate", "--device", context.device, "--out", str(context.out)]
    command += ["--json", *(["--quick"] if context.shapes.quick_calibration else [])]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"autockpt calibrate ended with {ran.returncode}: {ran.stderr.strip()[-400:]}")
    measured = json.loads(ran.stdout)
    from autockpt.schema.hardware import Hardware
    from tests.gpu.cards import described_like

    hardware = Hardware.model_validate(measured)
    like = described_like(_name(context.device), hardware.kind, hardware.memory_bytes)
    builtin = None if like is None else like.model_dump(mode="json")
    mine, other = _figures(measured), _figures(builtin or {})
    rows = {name: {"measured": mine.get(name), "built in": other.get(name)} for name in (mine | other)}
    for row in rows.values():
        row["ratio"] = row["measured"] / row["built in"] if row["measured"] is not None and row["built in"] else None
    return {"rows": rows, "like": like.name if like else None}


def _name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(torch.device(device)) if device != "cpu" else "cpu"


def _figures(data: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """All numbers by dotted name; tables of measured points are left to the file."""
    found: dict[str, float] = {}
    for name, value in data.items():
        if isinstance(value, dict):
            found |= _figures(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[prefix + name] = float(value)
    return found
