"""The profile of a workload on one device: op times, and menus with the costs of each choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import Field

from autockpt.schema.base import Data
from autockpt.schema.choices import Choice
from autockpt.schema.device import DeviceInfo, Environment
from autockpt.schema.graph import Unit


class MenuItem(Data):
    """One choice on one kind of unit, read off a ghost run. Bytes; seconds per cycle (all micro-batches)."""

    choice: Choice
    kept_bytes: int = Field(description="alive from the end of the unit's forward to the start of its backward")
    forward_peak_bytes: int = Field(description="most bytes of its own during the unit's forward")
    backward_peak_bytes: int = Field(description="most bytes of its own during the unit's backward, recompute included")
    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    copy_seconds: float = Field(default=0.0, description="copies that do not fit behind compute")
    host_seconds: float = Field(default=0.0, description="what carrying it out costs the host besides its ops")
    host_bytes: int = Field(default=0, description="what it moves to the host, at once")

    @property
    def seconds(self) -> float:
        """All that the choice takes on its unit in one cycle."""
        ops = self.forward_seconds + self.backward_seconds + self.recompute_seconds
        return ops + self.copy_seconds + self.host_seconds


class Menu(Data):
    """All choices of one kind of unit."""

    kind: int
    representative: str = Field(description="the unit that was ghost-run")
    items: tuple[MenuItem, ...]


class OpTimes(Data):
    """Seconds per op signature on one device, measured in real steps; cached by device and versions."""

    environment: Environment
    nominal: bool = Field(default=False, description="rates of common hardware: they only rank choices")
    seconds: dict[str, float] = Field(description="by op signature; median")
    optimizer_seconds: float = Field(default=0.0, description="the optimizer phase of one cycle, whole")
    host_seconds: float = Field(default=0.0, description="what each op costs on top of its kernel: Python, autograd")
    choice_seconds: dict[str, float] = Field(
        default_factory=dict,
        description="what carrying out a choice costs the host per unit and cycle besides its ops, by kind of choice",
    )
    rerun_scale: float = Field(default=1.0, description="times as long as at first an op takes when it runs again")
    copy_out_bandwidth: float = Field(default=0.0, description="bytes per second off the device")
    copy_in_bandwidth: float = Field(default=0.0, description="bytes per second back onto it")
    peer_bandwidth: float = Field(default=0.0, description="bytes per second to other ranks")
    peer_seconds: float = Field(default=0.0, description="least time of a collective")
    disk_out_bandwidth: float = Field(default=0.0, description="the same to a file; 0: not measured")
    disk_in_bandwidth: float = Field(default=0.0, description="and back")
    context_bytes: int = Field(default=0, description="what the device's context takes once steps have run")
    workspaces: tuple[int, ...] = Field(default=(), description="bytes that matrix libraries keep, by their handles")

    def host_seconds_of(self, choice: Choice) -> float:
        """Seconds per unit and cycle that carrying out a choice costs the host besides its ops."""
        # keep_attention is carried out as selective is
        kind = "selective" if choice.kind == "keep_attention" else choice.kind
        return self.choice_seconds.get(kind, 0.0)

    @property
    def device(self) -> DeviceInfo:
        """The device as steps find it: its context grows while kernels are loaded."""
        device = self.environment.device
        return device.model_copy(update={"overhead_bytes": max(device.overhead_bytes, self.context_bytes)})

    def completed(self, seconds: Mapping[str, float]) -> OpTimes:
        """These, with the ``seconds`` of ops that are not among them."""
        return self.model_copy(update={"seconds": {**seconds, **self.seconds}})


class Profile(Data):
    """The menus of every kind of unit, with the save-everything cycle they add to."""

    op_times: OpTimes
    menus: tuple[Menu, ...]
    save_all_peak_bytes: int
    save_all_seconds: float = Field(description="predicted cycle time with every unit on save")

    def head(self, blocks: Iterable[Unit]) -> Unit | None:
        """The model's output head, where it has choices: the one menu that is of none of the ``blocks``."""
        names = {unit.name for unit in blocks}
        own = next((menu for menu in self.menus if menu.representative not in names), None)
        return Unit(name=own.representative, cls="", kind=own.kind, role="head") if own is not None else None
