#!/usr/bin/env bash
# Ablation: with and without the auxiliary loss, both at once on one 8-GPU machine.
set -uo pipefail

ROOT=/data/ablation/$(date +%F)
mkdir -p "$ROOT/with_aux" "$ROOT/no_aux"
export OMP_NUM_THREADS=6

CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --standalone --nproc_per_node=4 \
    train.py --config conf/base.yaml --aux-weight 0.4 --out "$ROOT/with_aux" \
    > "$ROOT/with_aux/log.txt" 2>&1 &
pid_with=$!

CUDA_VISIBLE_DEVICES=4,5,6,7 torchrun --standalone --nproc_per_node=4 \
    train.py --config conf/base.yaml --aux-weight 0.0 --out "$ROOT/no_aux" \
    > "$ROOT/no_aux/log.txt" 2>&1 &
pid_no=$!

failed=0
for pid in "$pid_with" "$pid_no"; do
    wait "$pid" || failed=$((failed + 1))
done
echo "done, $failed of 2 runs failed"
exit "$failed"
