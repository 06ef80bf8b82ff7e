"""What a log says about the run besides its failure: how many ranks, which failed first, how many parameters train."""

from __future__ import annotations

import re
from typing import Any

_STAGE = re.compile(r"zero_optimization_stage[ .]{1,40}([0-3])\b|[\"']stage[\"'] ?: ?([0-3])\b")
_COUNT = r"[ \"']{0,3}[:=] {0,3}\[?([0-9]{1,6})\b"
_WORLD = (
    re.compile(rf"\bworld[_ ]size{_COUNT}", re.IGNORECASE),
    re.compile(rf"\b(?:num[_ ]processes|nproc[_ ]per[_ ]node|num[_ ]gpus){_COUNT}", re.IGNORECASE),
    re.compile(r"--(?:nproc[_-]per[_-]node|num_processes|num_gpus)[= ]([0-9]{1,6})\b"),
    re.compile(r"\bMEMBER: [0-9]{1,6}/([0-9]{1,6})\b"),  # Lightning
    re.compile(r"\brank:? [0-9]{1,6} ?(?:/|of) ?([0-9]{1,6})\b", re.IGNORECASE),
)
_FIRST = re.compile(r"Root Cause \(first observed failure\)(?s:.{0,600}?)\brank {0,8}: ([0-9]{1,6})\b")
_NUMBER = r"([0-9][0-9,_]{0,20})"
_TOTAL = re.compile(rf"\ball params: {_NUMBER}|Trainable parameters = [0-9,_]{{1,20}}/{_NUMBER}")
_TRAINABLE = re.compile(
    rf"\btrainable params: {_NUMBER}|\bNumber of trainable parameters = {_NUMBER}|Trainable parameters = {_NUMBER}/"
)
_FIXED_SEGMENTS = re.compile(r'expandable_segments not supported|File "[A-Za-z]:[\\/]')


def facts_of(text: str) -> dict[str, Any]:
    """Fields of a LogReading; of what is said several times the last counts."""
    return {
        "zero_stage": _last(_STAGE, text),
        "world": next(filter(None, (_last(pattern, text) for pattern in _WORLD)), None),
        "first_rank": _last(_FIRST, text),
        "total_params": _last(_TOTAL, text),
        "trainable_params": _last(_TRAINABLE, text),
        "can_expand": _FIXED_SEGMENTS.search(text) is None,
    }


def _last(pattern: re.Pattern[str], text: str) -> int | None:
    found = None
    for match in pattern.finditer(text):
        number = next(group for group in match.groups() if group is not None)
        found = int(re.sub("[,_]", "", number))
    return found
