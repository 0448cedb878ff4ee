#!/bin/bash
# run the ablation: with and without augmentation, 4 GPUs each
set -u

DATA=/data/cub200
OUT=/home/$USER/results/cub
mkdir -p "$OUT/aug" "$OUT/noaug"
export OMP_NUM_THREADS=4

CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun \
    --nproc_per_node=4 --master_port=29501 \
    finegrained.py --data "$DATA" --augment --out "$OUT/aug" \
    > "$OUT/aug/log.txt" 2>&1 &
PID_A=$!

CUDA_VISIBLE_DEVICES=4,5,6,7 torchrun \
    --nproc_per_node=4 --master_port=29501 \
    finegrained.py --data "$DATA" --out "$OUT/noaug" \
    > "$OUT/noaug/log.txt" 2>&1 &
PID_B=$!

trap 'kill $PID_A $PID_B' INT TERM
wait $PID_A
echo "with augmentation: exit $?"
wait $PID_B
echo "without augmentation: exit $?"

python compare.py "$OUT/aug" "$OUT/noaug"
