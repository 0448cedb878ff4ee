#!/bin/bash
# Train on the upper half of the box; GPUs 0-3 serve the demo.
set -euo pipefail

export CUDA_DEVICE_ORDER=PCI_BUS_ID
export CUDA_VISIBLE_DEVICES=${GPUS:-4,5,6,7}
IFS=, read -r -a DEVICES <<< "$CUDA_VISIBLE_DEVICES"
NPROC=${#DEVICES[@]}

SPLIT=${1:-a}
case $SPLIT in
    a|b|c) ;;
    *) echo "unknown split $SPLIT" >&2; exit 2 ;;
esac

ROOT=$(dirname "$(readlink -f "$0")")/..
cd "$ROOT"
OUT=exp/tracker_$SPLIT
mkdir -p "$OUT"

export OMP_NUM_THREADS=8
export PYTHONPATH=$ROOT

for d in "${DEVICES[@]}"; do
    used=$(nvidia-smi -i "$d" --query-gpu=memory.used --format=csv,noheader,nounits)
    if (( used > 500 )); then
        echo "GPU $d is in use ($used MiB)" >&2
        exit 1
    fi
done

echo "training split $SPLIT on $NPROC GPUs ($CUDA_VISIBLE_DEVICES)"
torchrun \
    --standalone \
    --nproc-per-node="$NPROC" \
    tools/train_tracker.py \
        --config configs/ostrack_256.yaml \
        --split "$SPLIT" \
        --batch-per-gpu 32 \
        --workers 8 \
        --resume \
        --out "$OUT" 2>&1 | tee -a "$OUT/log.txt"
