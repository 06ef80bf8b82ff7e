"""Ask a GPU everything, in parts that can be continued.

    python -m tests.gpu --parts 1,2 --out results/gpu/measured
    python -m tests.gpu --shapes tiny --out /tmp/tiny       exercises the script on the CPU

Every item runs in a process of its own with a limit. What is done is not done again (--fresh does it again); what ran
out of time or memory, or failed, is said so on the page and is tried again by the next call.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu import packages, pages
from tests.gpu.items import PARTS, Item, items_of, path_of, read, write, write_start
from tests.gpu.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[2]
SPARE_SECONDS = 10
KEEP_SECONDS = 30.0  # what an item has so far is on the pages no later than this


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for and write the pages. 0: all asked-for items are done; 1: some are not; 2: wrong usage."""
    began = time.monotonic()
    given = _options().parse_args(arguments)
    out: Path = given.out.resolve()
    parts = _parts(given.parts)
    if parts is None:
        print(f"--parts {given.parts}: write numbers from 1 to {max(PARTS)}, as in 1,2,5", file=sys.stderr)
        return 2
    shapes = SHAPES[given.shapes]
    chosen = [i for i in items_of(shapes) if i.part in parts and (given.only is None or given.only in i.slug)]
    if not chosen:
        print(f"--only {given.only}: no item has this in its name; all: {_names(shapes)}", file=sys.stderr)
        return 2

    def keep() -> None:
        try:
            pages.write(out, shapes, given.shapes)
        except Exception:  # a page that cannot be drawn loses no measurement
            (out / "pages.log").write_text(traceback.format_exc())

    if given.pages:
        keep()
    else:
        more = [name for item in chosen for name in item.needs]
        environment, broken, trouble = _prepared(out, given.wheels, given.shapes, list(dict.fromkeys(more)))
        if trouble:
            print(trouble, file=sys.stderr)
            return 2
        able = _able(chosen, broken)
        try:
            _run_all(able, given.shapes, out, environment, began + 60 * given.minutes, given.fresh, keep)
        finally:
            keep()
    print((out / "summary.md").read_text() if (out / "summary.md").exists() else "")
    return 0 if all(read(out, item).get("state") == "done" for item in chosen) else 1


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--parts", default=",".join(map(str, PARTS)), help="as in 1,2,5; default: all")
    parser.add_argument("--only", help="items with this in their name")
    parser.add_argument("--shapes", choices=tuple(SHAPES), default="card", help="tiny: on the CPU, for the script only")
    parser.add_argument("--out", type=Path, default=ROOT / "results/gpu/measured", help="folder for JSON and pages")
    parser.add_argument("--minutes", type=float, default=9.0, help="in all, installing and imports included")
    parser.add_argument("--fresh", action="store_true", help="run again what is done")
    parser.add_argument("--pages", action="store_true", help="run nothing, write the pages from what there is")
    parser.add_argument("--wheels", type=Path, help="folder of wheels: what is missing here is taken from there")
    return parser


def _names(shapes: Any) -> str:
    return ", ".join(item.slug for item in items_of(shapes))


def _parts(text: str) -> set[int] | None:
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    if not pieces or not all(piece.isdecimal() and int(piece) in PARTS for piece in pieces):
        return None
    return {int(piece) for piece in pieces}


def _able(chosen: list[Item], broken: dict[str, str]) -> list[Item]:
    """The items that need no package that cannot be imported; of the others it is said."""
    able = [item for item in chosen if broken.keys().isdisjoint(item.needs)]
    for item in chosen:
        if item not in able:
            print(f"{item.slug}: not begun, {'; '.join(broken[n] for n in item.needs if n in broken)}", flush=True)
    return able


def _prepared(
    out: Path, wheels: Path | None, shapes: str, more: list[str]
) -> tuple[dict[str, str], dict[str, str], str]:
    """Variables for all processes, which of ``more`` cannot be imported, and why nothing can run here (empty where it
    can): all that is missing, by name.

    ``more``: packages that the items to come need beside what the project itself does.
    """
    out.mkdir(parents=True, exist_ok=True)
    if wheels is not None and not wheels.is_dir():
        return {}, {}, f"--wheels {wheels}: there is no such folder"
    began = time.monotonic()
    target, taken = packages.unpack(wheels, out)
    environment = _environment(out, target)
    unpacked = time.monotonic() - began
    warm = packages.warmed(environment, more)
    names = ", ".join("-".join(name.split("-")[:2]) for name in taken) or "nothing"
    print(f"from wheels: {names}, in {unpacked:.1f} s. Importing everything once: {warm['seconds']:.1f} s", flush=True)
    write_start(out, {"from wheels": names, "unpacking": round(unpacked, 1), "first imports": warm["seconds"]})
    broken = {name: words for name, words in warm["missing"].items() if name in more}
    if fatal := [words for name, words in warm["missing"].items() if name not in more]:
        return {}, {}, f"cannot be imported: {'; '.join(fatal)}. --wheels takes packages from a folder of wheels"
    if shapes == "card" and not warm["devices"]:
        words = "there is no GPU here. --shapes tiny exercises the script on the CPU, which proves nothing about GPUs"
        return {}, {}, words
    return environment, broken, ""


def _environment(out: Path, unpacked: Path) -> dict[str, str]:
    """Variables for all processes: this checkout first, nothing from a network, caches beside the results."""
    environment = dict(os.environ)
    paths = [str(ROOT), str(unpacked), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("AUTOCKPT_CACHE", str(out / "cache"))
    environment.setdefault("HF_HUB_OFFLINE", "1")
    # bit-equal gradients of fused attention; it has to be there before the first product, and is the usual size on H100
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return environment


def _run_all(
    chosen: list[Item],
    shapes: str,
    out: Path,
    environment: dict[str, str],
    end: float,
    fresh: bool,
    keep: Callable[[], Any],
) -> None:
    """Item by item until ``end`` by the monotonic clock; ``keep`` is called after each, as a call may be cut off."""
    for item in chosen:
        left = end - time.monotonic() - SPARE_SECONDS
        if not fresh and read(out, item).get("state") == "done":
            print(f"{item.slug}: done before", flush=True)
        elif left < min(item.least, item.limit):
            print(f"{item.slug}: not begun, {left:.0f} s are left", flush=True)
        else:
            _run(item, shapes, out, environment, min(item.limit, left), keep)
            keep()


def _run(
    item: Item, shapes: str, out: Path, environment: dict[str, str], limit: float, keep: Callable[[], Any]
) -> None:
    """One item in a process group of its own, ended as a whole when its time is over. ``keep`` is called meanwhile."""
    print(f"{item.slug}: at most {limit:.0f} s …", end=" ", flush=True)
    began = time.monotonic()
    before = read(out, item)
    path_of(out, item).unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.gpu.child", item.slug, shapes, str(out)]
    with (out / f"{item.slug}.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None:
                left = began + limit - time.monotonic()
                if left <= 0:
                    _end(process)
                    write(out, item, read(out, item) | {"state": "out of time", "limit": limit})
                    break
                _wait(process, min(left, KEEP_SECONDS), keep)
        except BaseException:
            _end(process)
            raise
    found = read(out, item)
    if found.get("state") not in ("done", "failed", "out of memory", "out of time"):
        # the process died of itself; what it kept until then stays
        write(out, item, found | {"state": "failed", "message": f"ended with {process.returncode}; see its log"})
        found = read(out, item)
    if found["state"] != "done" and not found.get("data") and before.get("data"):
        write(out, item, found | {"data": before["data"], "data_from": "an earlier call"})
    print(f"{found['state']} in {time.monotonic() - began:.0f} s. {found.get('message', '')}", flush=True)


def _wait(process: subprocess.Popen[bytes], seconds: float, keep: Callable[[], Any]) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        keep()


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _stop(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)  # so that the item in progress ends as well
    sys.exit(main())
