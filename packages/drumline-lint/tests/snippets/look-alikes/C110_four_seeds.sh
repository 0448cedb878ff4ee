#!/bin/bash
set -euo pipefail
source /opt/venvs/seeds/bin/activate
export OMP_NUM_THREADS=4

base_port=29600
pids=()
for seed in 0 1 2 3; do
    gpus="$((2 * seed)),$((2 * seed + 1))"
    mkdir -p "runs/seed$seed"
    CUDA_VISIBLE_DEVICES=$gpus torchrun \
        --nproc_per_node=2 \
        --master_port=$((base_port + seed)) \
        train.py --seed "$seed" --out "runs/seed$seed" \
        > "runs/seed$seed/log.txt" 2>&1 &
    pids+=($!)
done

failed=0
for pid in "${pids[@]}"; do
    wait "$pid" || failed=1
done
exit $failed
