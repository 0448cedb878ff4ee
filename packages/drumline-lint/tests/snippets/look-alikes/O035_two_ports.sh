#!/bin/bash
# baseline and distilled student side by side
set -u

DATA=/data/kd/imagenet100
OUT=$HOME/kd
mkdir -p "$OUT/base" "$OUT/student"
export OMP_NUM_THREADS=4

CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun \
    --nproc_per_node=4 --master_port=29501 \
    train_kd.py --data "$DATA" --mode base --out "$OUT/base" \
    > "$OUT/base/log.txt" 2>&1 &
A=$!

CUDA_VISIBLE_DEVICES=4,5,6,7 torchrun \
    --nproc_per_node=4 --master_port=29502 \
    train_kd.py --data "$DATA" --mode student --teacher weights/t.pt --out "$OUT/student" \
    > "$OUT/student/log.txt" 2>&1 &
B=$!

trap 'kill $A $B 2>/dev/null' INT TERM
rc=0
wait "$A" || rc=$?
wait "$B" || rc=$?
exit "$rc"
