#!/bin/sh
# Every workload, one after the other. From the checkout's root, with
# pip install -c constraints.txt -e '.[dev]' and a C++ compiler. What is committed took fewer peers and rounds: see each command.txt. One workload alone: sh results/bench_cpu_202611/run.sh llama
set -eu
here=results/bench_cpu_202611
small=results/foresight_cpu_202611
export OMP_NUM_THREADS=1

bench() {
    name=$1
    shift
    case " ${wanted:-$name} " in *" $name "*) python -m tests.evidence.bench --device cpu --optimizer none --out $here/$name.md "$@" ;; esac
}

wanted="$*"
bench llama --model $here/llama.json --batch-size 8 --seq-len 256 --packed
bench gpt2 --model $here/gpt2.json --batch-size 8 --seq-len 256 --packed
bench bert --model $small/bert.json --batch-size 8 --seq-len 128 --packed
bench vit --model $small/vit.json --batch-size 8
bench mixtral --model $small/mixtral.json --batch-size 4 --seq-len 256 --packed
bench llama_long --model $here/llama_long.json --batch-size 1 --seq-len 2048 --packed
bench llama_vocabulary --model $here/llama_vocabulary.json --batch-size 4 --seq-len 256 --packed
