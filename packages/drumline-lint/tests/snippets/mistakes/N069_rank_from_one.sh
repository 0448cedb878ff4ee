#!/bin/bash
# start one process per GPU by hand (no torchrun in this image)
set -u

NGPU=4
export MASTER_ADDR=127.0.0.1
export MASTER_PORT=29876
export WORLD_SIZE=$NGPU
export OMP_NUM_THREADS=4

LOGS=logs/$(date +%H%M%S)
mkdir -p "$LOGS"

cleanup() {
    kill $(jobs -p) 2>/dev/null
}
trap cleanup INT TERM

for RANK in $(seq 1 $NGPU); do
    export RANK
    export LOCAL_RANK=$((RANK - 1))
    python -u train_matting.py \
        --dataset-name adobe \
        --resolution-lr 512 \
        --epochs 20 \
        --out checkpoint/stage1 \
        > "$LOGS/rank$RANK.log" 2>&1 &
done

wait
echo "done, logs in $LOGS"
