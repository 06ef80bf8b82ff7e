"""What ``autockpt diagnose`` is asked: what a failed run left behind, and the job that it was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autockpt.diagnose.oom_log import read_log
from autockpt.diagnose.snapshot import read_snapshot
from autockpt.errors import UsageError
from autockpt.schema import Budget, WorkloadSpec
from autockpt.schema.diagnosis import CommandReading, DeviceFailure, LogReading, SnapshotReading
from autockpt.schema.files import read_regular, reason
from autockpt.schema.hardware import Hardware

_ARCHIVES = {
    b"PK\x03\x04": "a zip archive, as torch.save writes",
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
}


@dataclass(frozen=True)
class DiagnoseRequest:
    """The evidence (a log or a snapshot, already read), the command that was run, and the job in autockpt's own words.

    Without ``spec`` only the evidence is told. ``budget`` is of kind bytes or auto; None: what the device has.
    """

    log: LogReading | None = None
    snapshot: SnapshotReading | None = None
    command: CommandReading | None = None
    spec: WorkloadSpec | None = None
    budget: Budget | None = None
    hardware: Hardware | None = None
    plan_out: Path | None = None

    @property
    def failure(self) -> DeviceFailure | None:
        """The first failure of a device that the log tells of."""
        return self.log.failures[0] if self.log is not None and self.log.failures else None


def read_evidence(path: Path) -> LogReading | SnapshotReading:
    """What a file tells, be it a log or a snapshot. Raises UsageError for one that is neither."""
    try:
        head = read_regular(path, 8, links=True)
    except OSError as error:
        remedy = "Name the log of the failed run, or a memory snapshot."
        raise UsageError(f"{path} cannot be read: {reason(error)}", remedy=remedy) from None
    for magic, what in _ARCHIVES.items():
        if head.startswith(magic):
            raise UsageError(f"{path} is {what}, not a log or a memory snapshot", remedy="Unpack it first.")
    binary_pickle = len(head) > 1 and head[0] == 0x80 and head[1] <= 5
    return read_snapshot(path) if binary_pickle or path.suffix in (".pickle", ".pkl") else read_log(path)
