#!/bin/sh
# From the checkout's root, with pip install -c constraints.txt -e '.[dev]'.
set -eu
OMP_NUM_THREADS=1 python -m tests.evidence.bench.cpu_seconds results/moe_cpu_202611/cpu_seconds.json
