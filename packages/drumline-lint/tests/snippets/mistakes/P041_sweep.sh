#!/bin/bash
# Learning-rate sweep on one 8-GPU server: two runs of 4 GPUs side by side.
set -e

cd "$(dirname "$0")/.."
source .venv/bin/activate

DATA=/mnt/nvme/laion_subset
SWEEP=sweeps/$(date +%Y%m%d_%H%M)
mkdir -p "$SWEEP"

export OMP_NUM_THREADS=4
export WANDB_PROJECT=clip-sweep
export WANDB_RUN_GROUP=$(basename "$SWEEP")
export MASTER_PORT=29500

run() {
    local gpus=$1 lr=$2 wd=$3
    local name="lr${lr}_wd${wd}"
    CUDA_VISIBLE_DEVICES=$gpus torchrun \
        --nnodes=1 \
        --nproc_per_node=4 \
        --master_addr=127.0.0.1 \
        --master_port=$MASTER_PORT \
        -m open_clip_train.main \
        --train-data "$DATA/{00000..01023}.tar" \
        --train-num-samples 8000000 \
        --dataset-type webdataset \
        --model ViT-B-32 \
        --batch-size 256 \
        --lr "$lr" \
        --wd "$wd" \
        --warmup 2000 \
        --epochs 4 \
        --workers 6 \
        --precision amp_bf16 \
        --report-to wandb \
        --name "$name" \
        --logs "$SWEEP" \
        > "$SWEEP/$name.log" 2>&1
}

for wd in 0.1 0.2; do
    run 0,1,2,3 5e-4 $wd &
    first=$!
    run 4,5,6,7 1e-3 $wd &
    second=$!
    wait $first || echo "run on 0-3 failed (wd $wd)"
    wait $second || echo "run on 4-7 failed (wd $wd)"
done

python tools/summarize.py "$SWEEP" > "$SWEEP/summary.csv"
column -s, -t "$SWEEP/summary.csv"
