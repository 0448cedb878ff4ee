#!/usr/bin/env bash
# Compare two optimizers on the workstation: GPUs 0,1 for AdamW and 2,3 for Lion.
set -eu

DATA=${DATA:-/data/imagenet100}
EPOCHS=${EPOCHS:-90}
SEED=${SEED:-0}
export OMP_NUM_THREADS=6

mkdir -p runs/adamw runs/lion

CUDA_VISIBLE_DEVICES=0,1 torchrun \
    --nnodes=1 --node_rank=0 --nproc_per_node=2 \
    --master_addr=127.0.0.1 --master_port=29501 \
    train.py --opt adamw --lr 1e-3 --data "$DATA" --epochs "$EPOCHS" \
    --seed "$SEED" --out runs/adamw > runs/adamw/log.txt 2>&1 &
first=$!

CUDA_VISIBLE_DEVICES=2,3 torchrun \
    --nnodes=1 --node_rank=0 --nproc_per_node=2 \
    --master_addr=127.0.0.1 --master_port=29501 \
    train.py --opt lion --lr 2e-4 --data "$DATA" --epochs "$EPOCHS" \
    --seed "$SEED" --out runs/lion > runs/lion/log.txt 2>&1 &
second=$!

echo "adamw: pid $first, lion: pid $second"
wait "$first" && echo "adamw done"
wait "$second" && echo "lion done"

python plot_runs.py runs/adamw runs/lion --out comparison.png
