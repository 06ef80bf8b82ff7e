"""One thing at a time taken out of the code that orders streams: what the scenarios are there to notice.

python -m tests.standin.mutants [NAME …]     # in a process that has the stand-in
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tests.standin.inside import scenarios

standin = torch.get_device_module("standin")
SCHEDULES = ("lazy", "random:1", "copies-late", "compute-late")
PATIENCE = 1800


class Mutant(NamedTuple):
    module: str
    old: str
    new: str
    equivalent: str = ""  # why nobody can notice, where that is so


_STREAMS, _DISK = "autockpt.devices.streams", "autockpt.devices.disk"
_SAVED, _PRINTS = "autockpt.checkpointing.offloaded", "autockpt.checkpointing.fingerprint"
_DIVERGENCE = "autockpt.checkpointing.divergence"
_ELSEWHERE = "if stream_of({}.device) != self._stream"
MUTANTS = {
    "the copy out does not wait for what made the source": Mutant(_STREAMS, "[self._ready, *earlier]", "[*earlier]"),
    "the copy out does not wait for whoever had the host memory": Mutant(
        _STREAMS,
        "[self._ready, *earlier]",
        "[self._ready]",
    ),
    "settling does not wait for the copy": Mutant(
        _STREAMS,
        "            self._queues.wait(self._left)\n            # the source",
        "            # the source",
    ),
    "settling does not hold up the queue of the source": Mutant(
        _STREAMS, "            self._queues.wait_on(self._ready, self._left)\n", ""
    ),
    "the copy in does not wait for the buffer to be free": Mutant(
        _STREAMS, "[self._queues.mark(), self._left]", "[self._left]"
    ),
    "the copy in does not wait for the copy out": Mutant(
        _STREAMS,
        "[self._queues.mark(), self._left]",
        "[self._queues.mark()]",
        equivalent="only what is settled is fetched, and whoever may read a graph comes after its forward and that",
    ),
    "nobody waits for the copy in": Mutant(
        _STREAMS, "        self._queues.wait(self._arrived)  # each", "        # each"
    ),
    "only the first reader waits for the copy in": Mutant(
        _STREAMS, "self._queues.wait(self._arrived)  # each", "self._waited or self._queues.wait(self._arrived)  # each"
    ),
    "the allocator is not told who reads a buffer": Mutant(_STREAMS, "        self._queues.use(self._back)\n", ""),
    "a buffer that nobody waited for is let go": Mutant(
        _STREAMS, '                self._queues.record_stream(self._back, "in")\n', "                pass\n"
    ),
    "a source that nobody waited for is let go": Mutant(
        _STREAMS, '                self._queues.record_stream(self._source, "out")\n', "                pass\n"
    ),
    "host memory is used again at once": Mutant(
        _STREAMS,
        "            self._piece.ready = self._left if self._arrived is None else self._arrived\n",
        "",
    ),
    "host memory is used again after the copy out": Mutant(
        _STREAMS, "self._left if self._arrived is None else self._arrived", "self._left"
    ),
    "host memory that is cut anew is used at once": Mutant(
        "autockpt.devices.hostpool", "self._varies, self._cut = True, self._moment()", "self._varies = True"
    ),
    "copies wait for nothing": Mutant(
        _STREAMS,
        "            stream.wait_event(event.event if isinstance(event, _Mark) else event)\n",
        "            pass\n",
    ),
    "another stream's queue is not held up": Mutant(
        _STREAMS, "            mark.stream.wait_event(event)\n", "            pass\n"
    ),
    "copies that nobody waited for may still be on their way when more is sent": Mutant(
        _STREAMS,
        "                self.queues.finish(self.unwaited.pop())\n",
        "                self.unwaited.pop()\n",
        equivalent="the allocator knows of those copies; only memory is lost, which peaks tell",
    ),
    "an abandoned buffer is told to nobody": Mutant(
        _STREAMS, "        buffer.record_stream(self._streams[direction])\n", "        pass\n"
    ),
    "disk: the copy out does not wait for what made the source": Mutant(
        _DISK,
        'self._queues.copy("out", target, source[part], [self._ready])',
        'self._queues.copy("out", target, source[part], [])',
    ),
    "disk: settling does not wait for the copy": Mutant(
        _DISK,
        "            self._out.left.result()  # no copy",
        "            # no copy",
        equivalent="the thread holds the source until its copy has ended; only when the memory is free is lost",
    ),
    "disk: the thread writes before the copy has ended": Mutant(
        _DISK,
        "                self._queues.finish(event)\n            waiting",
        "                pass\n            waiting",
    ),
    "disk: the copy in does not wait for the buffer to be free": Mutant(
        _DISK,
        'self._queues.copy("in", buffer[part], source, [self._ready])',
        'self._queues.copy("in", buffer[part], source, [])',
    ),
    "disk: nobody waits for the copy in": Mutant(_DISK, "        self._queues.wait(job.arrived)\n", ""),
    "disk: the allocator is not told who reads a buffer": Mutant(_DISK, "        self._queues.use(job.buffer)\n", ""),
    "disk: a buffer that nobody waited for is let go": Mutant(
        _DISK, '            self._queues.record_stream(self.buffer, "in")\n', "            pass\n"
    ),
    "disk: pinned memory is used again while a copy reads it": Mutant(
        _DISK, "event = half.busy = self._queues", "event = self._queues"
    ),
    "disk: a place in the file is read before it was written": Mutant(
        _DISK,
        "        self._written.result()  # an error",
        "        # an error",
        equivalent="one thread does both, in order",
    ),
    "the memory of what was sent stays until backward": Mutant(
        _SAVED,
        "            storage.handle.settle()",
        "            pass",
        equivalent="what was never let go need not be fetched; only memory is lost, which peaks tell",
    ),
    "sentinels: the one read does not wait for other streams": Mutant(
        _PRINTS,
        "            here.wait_event(stream.record_event())\n",
        "            pass\n",
    ),
    "sentinels: a table is handed to streams that did not wait for it": Mutant(
        _PRINTS, "            stream.synchronize()  # once", "            pass  # once"
    ),
    "sentinels: fingerprints are taken on whatever stream forward ends on": Mutant(
        _DIVERGENCE, _ELSEWHERE.format("tensor"), "if False"
    ),
    "sentinels: what lives is looked at again on any stream": Mutant(
        _DIVERGENCE, _ELSEWHERE.format("self._form"), "if False"
    ),
    "sentinels: what is handed out is compared on any stream": Mutant(
        _DIVERGENCE,
        _ELSEWHERE.format("value"),
        "if False",
        equivalent="autograd runs a node on the stream that its forward ran on, and there asks for what it saved",
    ),
}


def apply(mutant: Mutant) -> None:
    """Give the classes and functions of a module that is already in use the code of the mutant."""
    module = importlib.import_module(mutant.module)
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(mutant.old) == 1, f"{source.count(mutant.old)} places in {module.__file__} read: {mutant.old}"
    changed: dict[str, Any] = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(source.replace(mutant.old, mutant.new), module.__file__, "exec"), changed)
    if "_all_of" in changed:
        changed["_all_of"] = scenarios.announced(changed["_all_of"])
    for name, thing in vars(module).items():
        if getattr(thing, "__module__", None) != module.__name__ or name not in changed:
            continue
        if isinstance(thing, FunctionType):
            thing.__code__ = changed[name].__code__
        elif isinstance(thing, type):
            for attribute, value in vars(changed[name]).items():
                if callable(value):
                    setattr(thing, attribute, value)


def noticed() -> str:
    """What the first scenario says that goes wrong; nothing where all go well."""
    drawn = {f"drawn {seed}": scenarios.generated(seed) for seed in range(12)}
    own = {
        "one tensor on two streams": (scenarios.Twofold, scenarios.step),
        "nobody waits": (scenarios.Aside, scenarios.SCENARIOS["units on two streams"]),
    }
    plain = {name: (scenarios.Block, scenario) for name, scenario in (scenarios.SCENARIOS | drawn).items()}
    for name, (block, scenario) in (own | plain).items():
        standin.set_schedule("random:7")
        wanted = scenarios.run(scenario, None, block)
        for n, (plan, choices) in enumerate(scenarios.PLANS.items()):
            if plan == "made again" and block is scenarios.Aside:
                continue  # refused by name: what an autograd function of one's own saves
            schedule = SCHEDULES[(n + len(name)) % len(SCHEDULES)]
            standin.set_schedule(schedule)
            try:
                got = scenarios.run(scenario, choices, block)
                standin.synchronize()
            except Exception as error:
                return f"{name}, {plan}, {schedule}: {type(error).__name__}: {str(error).splitlines()[0]}"
            if races := standin.races():
                return f"{name}, {plan}, {schedule}: {races[0]}"
            if any(not torch.equal(got[key], wanted[key]) for key in wanted):
                return f"{name}, {plan}, {schedule}: wrong numbers"
    return ""


def outcome(mutant: Mutant | None) -> str:
    """``noticed`` in a forked process, which ends with the mutant."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(PATIENCE)  # a mutant may wait for ever
        if mutant is not None:
            apply(mutant)
        os.write(writes, (noticed() or "-").encode())
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as pipe:
        text = pipe.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return ("" if text == "-" else text) if text else f"the process ended with {code}"


if __name__ == "__main__":
    wrong = []
    for name in sys.argv[1:] or ["nothing taken out", *MUTANTS]:
        mutant = MUTANTS.get(name)
        found = outcome(mutant)
        expected = mutant is not None and not mutant.equivalent
        wrong += [name] * (bool(found) != expected)
        print(f"{name}: {found or 'not noticed'}", flush=True)
    sys.exit("\n".join(["not as expected:", *wrong]) if wrong else 0)
