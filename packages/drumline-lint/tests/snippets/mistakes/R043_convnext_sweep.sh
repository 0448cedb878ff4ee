#!/usr/bin/env bash
# Learning-rate sweep on one 8-GPU box, two runs side by side on four GPUs each.
set -uo pipefail

cd "$(dirname "$0")"
source env.sh

LRS=(1e-4 2e-4 5e-4 1e-3)
SEEDS=(0 1)
MASTER_PORT=29500
STAMP=$(date +%y%m%d)
ROOT=/scratch/sweeps/convnext_$STAMP
mkdir -p "$ROOT"

export OMP_NUM_THREADS=6
export PYTHONUNBUFFERED=1

run() {
    local gpus=$1 lr=$2 seed=$3
    local dir=$ROOT/lr${lr}_s${seed}
    mkdir -p "$dir"
    if [[ -f $dir/DONE ]]; then
        echo "skip $dir"
        return 0
    fi
    CUDA_VISIBLE_DEVICES=$gpus torchrun \
        --nnodes=1 --nproc-per-node=4 \
        --master-addr=127.0.0.1 --master-port=$MASTER_PORT \
        train.py \
            --model convnext_tiny \
            --data /scratch/data/inat21-mini \
            --batch-size 128 \
            --epochs 60 \
            --lr "$lr" \
            --seed "$seed" \
            --output "$dir" \
        > "$dir/log.txt" 2>&1 && touch "$dir/DONE"
}

for lr in "${LRS[@]}"; do
    echo "$(date +%T) lr=$lr"
    run 0,1,2,3 "$lr" "${SEEDS[0]}" &
    run 4,5,6,7 "$lr" "${SEEDS[1]}" &
    wait
done

python summarize.py "$ROOT" --metric val_top1 > "$ROOT/summary.csv"
column -s, -t "$ROOT/summary.csv"
