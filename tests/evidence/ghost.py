"""Time and memory of ghost runs of real sizes, plain and with a plan applied, beyond the imports.

    python -m tests.evidence.ghost

Each case runs in a fresh process. Seconds from the first call after the imports to the finished Graph (building the
model out of ghosts, the warm-up cycle and the recorded one), then those of a second trace; memory is the peak of that
process and of the child that holds the ghosts, which share most of their pages.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

CASES = (
    ("llama-8b", 4, 2048, "save"),
    ("llama-8b", 4, 2048, "recompute"),
    ("llama-8b", 4, 2048, "offload"),
    ("llama-70b", 1, 4096, "recompute"),
    ("llama-small", 8, 256, "recompute"),
)


def case(model: str, batch: int, length: int, kind: str) -> None:
    """One case in this process."""
    import transformers
    import transformers.modeling_utils  # noqa: F401

    from autockpt.schema import WorkloadSpec, parse_choice
    from autockpt.tracing import Tracer

    begin = time.perf_counter()
    with Tracer.from_spec(WorkloadSpec(model=model, batch_size=batch, seq_len=length)) as tracer:
        choices = {u.name: parse_choice(kind) for u in tracer.units if u.role == "block"}
        graph = tracer.trace(choices)
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        tracer.trace(choices)
        second = time.perf_counter() - begin
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(
        f"| {model} | {batch} × {length} | {kind} | {len(graph.ops)} | {graph.peak_bytes / 2**30:.2f} GiB "
        f"| {first:.2f} | {second:.2f} | {own / 2**20:.2f} | {child / 2**20:.2f} |"
    )


def main() -> None:
    """All cases, each in a fresh process, three times."""
    print("| model | batch | choice | ops | peak | first trace, s | next, s | RSS, GiB | RSS of the child, GiB |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for arguments in CASES:
        for _ in range(3):
            subprocess.run([sys.executable, "-m", "tests.evidence.ghost", *map(str, arguments)], check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        case(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
