#!/usr/bin/env bash
# Learning-rate sweep for the CIFAR diffusion model: two settings at a time,
# four GPUs each, on one eight-GPU server.
set -uo pipefail

OUT=${OUT:-runs/ddpm_lr_sweep}
STEPS=${STEPS:-200000}
SEEDS=(0 1)
PAIRS=("1e-4 2e-4" "4e-4 8e-4")

export OMP_NUM_THREADS=4
export WANDB_PROJECT=ddpm-cifar
mkdir -p "$OUT"

train() {
    local gpus=$1 lr=$2 seed=$3
    local dir=$OUT/lr${lr}_s${seed}
    mkdir -p "$dir"
    if [ -f "$dir/DONE" ]; then
        echo "skip $dir"
        return 0
    fi
    CUDA_VISIBLE_DEVICES=$gpus torchrun \
        --nnodes=1 --node_rank=0 \
        --nproc_per_node=4 \
        --master_addr=127.0.0.1 \
        --master_port=29501 \
        train_ddpm.py \
        --lr "$lr" --seed "$seed" --steps "$STEPS" \
        --batch_size 64 --ema 0.9999 \
        --out "$dir" > "$dir/train.log" 2>&1 && touch "$dir/DONE"
}

for seed in "${SEEDS[@]}"; do
    for pair in "${PAIRS[@]}"; do
        read -r lr_a lr_b <<< "$pair"
        echo "[$(date +%T)] seed $seed: lr $lr_a and $lr_b"
        train 0,1,2,3 "$lr_a" "$seed" &
        train 4,5,6,7 "$lr_b" "$seed" &
        wait
    done
done

python summarize_sweep.py "$OUT" > "$OUT/summary.md"
