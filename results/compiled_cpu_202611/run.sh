#!/bin/sh
# Compiled training side by side: save everything, recompute all and PyTorch's activation_memory_budget, compiled as one
# model, beside plans of `autockpt search --compile layers`. From the checkout's root, with
# pip install -c constraints.txt -e . and a C++ compiler.
set -eu
export OMP_NUM_THREADS=1
python -m tests.evidence.bench --model llama-small --device cpu --budgets 45%,60%,75% --rounds 12 --most-rounds 24 \
    --peers 'torch.compile,recompute all compiled,autockpt compiled layers' --out results/compiled_cpu_202611/page.md
# plans for the model as one graph beside plans of layers: takes the place of bench-llama-small_cpu_f14b3732, an earlier run
python -m tests.evidence.bench --model llama-small --device cpu --budgets 60%,75% --rounds 12 --most-rounds 30 \
    --peers 'torch.compile,autockpt compiled model,autockpt compiled layers' --out results/compiled_cpu_202611/one_graph.md
