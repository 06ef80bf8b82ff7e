"""Wrapped modules are recognised as what they wrap."""

from __future__ import annotations

from torch import nn

from autockpt.workload.names import class_name


def test_fsdp2_renames_classes_in_place() -> None:
    class FSDPLinear(nn.Linear):
        pass

    class FSDPThing(nn.Module):
        pass

    assert class_name(FSDPLinear(1, 1)) == "Linear"
    assert class_name(FSDPThing()) == "FSDPThing"
