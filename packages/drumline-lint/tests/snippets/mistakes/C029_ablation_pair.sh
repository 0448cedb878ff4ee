#!/usr/bin/env bash
# Ablation: with and without the auxiliary loss, side by side on one 4-GPU box.
set -u
cd "$(dirname "$0")/.."
source .venv/bin/activate

export OMP_NUM_THREADS=4
LOGS=logs/aux_ablation
mkdir -p "$LOGS"

CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 train.py \
    --config configs/base.yaml --aux-weight 0.0 --tag no_aux \
    > "$LOGS/no_aux.log" 2>&1 &
pid_a=$!

CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node=2 train.py \
    --config configs/base.yaml --aux-weight 0.4 --tag aux \
    > "$LOGS/aux.log" 2>&1 &
pid_b=$!

wait "$pid_a"; echo "no_aux: $?"
wait "$pid_b"; echo "aux: $?"
