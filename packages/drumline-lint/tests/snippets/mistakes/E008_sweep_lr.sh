#!/usr/bin/env bash
# Learning-rate sweep, two runs at a time on one 8-GPU machine.
set -uo pipefail

DATA=${DATA:-/data/librispeech}
ROOT=${ROOT:-runs/lr_sweep}
PORT=29500
LRS=(1e-4 3e-4 5e-4 1e-3)

export OMP_NUM_THREADS=6

run_one() {
    local gpus=$1 lr=$2
    local out=$ROOT/lr_$lr
    mkdir -p "$out"
    echo "[$(date +%T)] lr=$lr gpus=$gpus"
    CUDA_VISIBLE_DEVICES=$gpus torchrun \
        --nnodes=1 \
        --node_rank=0 \
        --nproc_per_node=4 \
        --master_addr=127.0.0.1 \
        --master_port=$PORT \
        train_asr.py \
        --data "$DATA" \
        --lr "$lr" \
        --epochs 40 \
        --out "$out" \
        > "$out/log.txt" 2>&1
}

for ((k = 0; k < ${#LRS[@]}; k += 2)); do
    run_one 0,1,2,3 "${LRS[k]}" &
    first=$!
    if ((k + 1 < ${#LRS[@]})); then
        run_one 4,5,6,7 "${LRS[k + 1]}" &
        second=$!
        wait "$second" || echo "lr=${LRS[k + 1]} failed"
    fi
    wait "$first" || echo "lr=${LRS[k]} failed"
done

python tools/collect.py "$ROOT" > "$ROOT/summary.tsv"
cat "$ROOT/summary.tsv"
