#!/usr/bin/env bash
# Student and teacher-free baseline at the same time, four GPUs each.
set -euo pipefail
cd "$(dirname "$0")"
source venv/bin/activate

export OMP_NUM_THREADS=8
DATA=/data/imagenet
LOGS=logs/$(date +%F_%H-%M)
mkdir -p "$LOGS" ckpt/student ckpt/baseline

pids=()
CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --standalone --nproc_per_node=4 distill.py \
    --data "$DATA" --teacher ckpt/teacher.pt --out ckpt/student \
    > "$LOGS/student.log" 2>&1 &
pids+=($!)

CUDA_VISIBLE_DEVICES=4,5,6,7 torchrun --standalone --nproc_per_node=4 train.py \
    --data "$DATA" --out ckpt/baseline \
    > "$LOGS/baseline.log" 2>&1 &
pids+=($!)

failed=0
for pid in "${pids[@]}"; do
    wait "$pid" || failed=1
done
echo "done, logs in $LOGS"
exit "$failed"
