"""Measures the machine in a process of its own, which starts with the settings that measured steps start with.

``python -m autockpt.profiling.machine_child READ_FD WRITE_FD``: one request in, what is being measured and at last the
result or an error out, as lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autockpt.errors import AutockptError, MeasurementError
from autockpt.schema.machine import Machine

PATIENCE = 300.0  # seconds without a sign of life
Tell = Callable[[str], None]


def measure_in_child(device: str | None, *, quick: bool, tell: Tell) -> Machine:
    """``measure_machine`` in a child process. Raises what it raises, and MeasurementError where the child dies."""
    from autockpt.devices import get_device
    from autockpt.measuring.failures import from_wire
    from autockpt.measuring.process import Child, ChildDied, ChildSilent, child_environment, last_lines

    wanted = get_device(device).environment  # UsageError for a device that is not there
    with tempfile.NamedTemporaryFile(prefix="autockpt-calibrate-", suffix=".log") as log:
        child = Child(__name__, log=log, environment=child_environment(wanted))  # type: ignore[arg-type]
        try:
            child.send({"device": device, "quick": quick}, PATIENCE)
            while True:
                answer = child.receive(PATIENCE)
                if "tell" in answer:
                    tell(answer["tell"])
                elif "error" in answer:
                    raise from_wire(answer["error"])
                else:
                    return Machine.model_validate(answer["machine"])
        except (ChildDied, ChildSilent) as error:
            said = last_lines(Path(log.name))
            raise MeasurementError(
                f"measuring ended early ({error or 'no sign of life'})" + (f":\n{said}" if said else ""),
                remedy="Try --quick, or another device.",
            ) from None
        finally:
            child.kill()


def main(reads: int, writes: int) -> None:
    """Entry of the child."""
    with os.fdopen(reads) as requests, os.fdopen(writes, "w") as answers:

        def answer(data: dict[str, Any]) -> None:
            print(json.dumps(data), file=answers, flush=True)

        request = json.loads(requests.readline())
        try:
            from autockpt.devices import get_device, make_current
            from autockpt.profiling.machine import measure_machine

            device = get_device(request["device"])
            make_current(device)
            machine = measure_machine(device, quick=request["quick"], tell=lambda what: answer({"tell": what}))
            answer({"machine": machine.model_dump(mode="json")})
        except AutockptError as error:
            from autockpt.measuring.failures import to_wire

            answer({"error": to_wire(error)})


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
