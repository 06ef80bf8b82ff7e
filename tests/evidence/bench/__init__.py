"""Side by side with every other way of saving memory: the same machine, batch and meter, interleaved steps."""

from tests.evidence.bench.run import run_bench
