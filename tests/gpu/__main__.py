"""Ask a GPU everything, in parts that can be continued.

    python -m tests.gpu --parts 1,2 --out results/gpu/measured
    python -m tests.gpu --shapes tiny --out /tmp/tiny       exercises the script on the CPU

Every item runs in a process of its own with a limit. What is done is not done again (--fresh does it again); what ran
out of time or memory, or failed, is said so on the page and is tried again by the next call.
"""

import argparse
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autockpt.process import Child, ChildDied, ChildSilent, child_environment
from tests.gpu import pages
from tests.gpu.items import PARTS, Item, items_of, path_of, read, write
from tests.gpu.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[2]
SPARE_SECONDS = 10
_IMPORTS = """
import torch, transformers.models.llama.modeling_llama, scipy.special, optuna, jinja2
import autockpt.cli.app, autockpt.measuring, autockpt.tracing, tests.gpu.jobs
print(torch.cuda.device_count())
if torch.cuda.is_available():
    torch.ones(16, 16, device="cuda").mm(torch.ones(16, 16, device="cuda")).cpu()
"""


def main() -> int:
    """Run what is asked for and write the pages. 0: all asked-for items are done; 1: some are not; 2: wrong usage."""
    began = time.monotonic()
    parser = _parser()
    given = parser.parse_args()
    out, items = given.out.resolve(), items_of(SHAPES[given.shapes])
    chosen = [item for item in items if item.part in given.parts and given.only in item.slug]
    if not chosen:
        parser.error(f"--only {given.only}: no item has this in its name; all: {', '.join(i.slug for i in items)}")

    out.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        try:
            pages.write(out, SHAPES[given.shapes], given.shapes)
        except Exception:  # a page that cannot be drawn loses no measurement
            (out / "pages.log").write_text(traceback.format_exc())

    try:
        if not given.pages:
            environment = _environment(out)
            _import_everything_once(parser, environment, given.shapes)
            Runs(given.shapes, out, environment, keep).all(chosen, began + 60 * given.minutes, given.fresh)
    finally:
        keep()
    print((out / "summary.md").read_text() if (out / "summary.md").exists() else "")
    return 0 if all(read(out, item).get("state") == "done" for item in chosen) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--parts", type=_parts, default=set(PARTS), help="as in 1,2,5; default: all")
    parser.add_argument("--only", default="", help="items with this in their name")
    parser.add_argument("--shapes", choices=tuple(SHAPES), default="card", help="tiny: on the CPU, for the script only")
    parser.add_argument("--out", type=Path, default=ROOT / "results/gpu/measured", help="folder for JSON and pages")
    parser.add_argument("--minutes", type=float, default=9.0, help="in all, imports included")
    parser.add_argument("--fresh", action="store_true", help="run again what is done")
    parser.add_argument("--pages", action="store_true", help="run nothing, write the pages from what there is")
    return parser


def _parts(text: str) -> set[int]:
    parts = {int(piece) for piece in text.split(",")}
    if not parts <= set(PARTS):
        raise argparse.ArgumentTypeError(f"write numbers from 1 to {max(PARTS)}, as in 1,2,5")
    return parts


def _environment(out: Path) -> dict[str, str]:
    """Variables for all processes: this checkout's modules, nothing from a network, caches beside the results."""
    wanted = {"AUTOCKPT_CACHE": str(out / "cache"), "HF_HUB_OFFLINE": "1"}
    # bit-equal gradients of fused attention; it has to be there before the first product, and is the usual size on H100
    return child_environment(wanted | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})


def _import_everything_once(parser: argparse.ArgumentParser, environment: Mapping[str, str], shapes: str) -> None:
    """The first import from a cold disk takes many times what later ones do, and should not be part of an item's time.

    Ends the script where nothing can run here.
    """
    began = time.monotonic()
    ran = subprocess.run([sys.executable, "-c", _IMPORTS], env=environment, capture_output=True, text=True)
    if ran.returncode:
        parser.error(f"a process that imports everything: {ran.stderr.strip()[-300:]}")
    print(f"Importing everything once: {time.monotonic() - began:.1f} s", flush=True)
    if shapes == "card" and ran.stdout.split()[-1] == "0":
        parser.error("there is no GPU. --shapes tiny exercises the script on the CPU, which proves nothing about GPUs")


@dataclass(frozen=True)
class Runs:
    """Runs items, each in a process of its own. ``keep`` writes the pages."""

    shapes: str
    out: Path
    environment: Mapping[str, str]
    keep: Callable[[], object]

    def all(self, items: Sequence[Item], end: float, fresh: bool) -> None:
        """Item by item until ``end`` by the monotonic clock."""
        for item in items:
            left = end - time.monotonic() - SPARE_SECONDS
            if not fresh and read(self.out, item).get("state") == "done":
                print(f"{item.slug}: done before", flush=True)
            elif left < min(item.least, item.limit):
                print(f"{item.slug}: not begun, {left:.0f} s are left", flush=True)
            else:
                self.one(item, min(item.limit, left))

    def one(self, item: Item, limit: float) -> None:
        """One item; what it has so far is on the pages at once, as a call may be cut off."""
        print(f"{item.slug}: at most {limit:.0f} s …", end=" ", flush=True)
        began, before, found = time.monotonic(), read(self.out, item), dict[str, Any]()
        path_of(self.out, item).unlink(missing_ok=True)
        with (
            (self.out / f"{item.slug}.log").open("wb") as log,
            closing(Child.spawn("tests.gpu.child", log=log, environment=self.environment)) as child,
        ):
            try:
                child.send((item, self.shapes, self.out))
                while found.get("state") in (None, "partial"):
                    found |= child.receive(began + limit - time.monotonic())
                    self._write(item, found)
            except ChildSilent:
                found |= {"state": "out of time", "limit": limit}
            except ChildDied as death:  # what it kept until then stays
                found |= {"state": "failed", "message": f"ended with {death.code}; see its log"}
        if found["state"] != "done" and not found.get("data") and before.get("data"):
            found |= {"data": before["data"], "data_from": "an earlier call"}
        self._write(item, found)
        print(f"{found['state']} in {time.monotonic() - began:.0f} s. {found.get('message', '')}", flush=True)

    def _write(self, item: Item, found: dict[str, Any]) -> None:
        write(self.out, item, found)
        self.keep()


def _stop(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)  # so that the item in progress ends as well
    sys.exit(main())
