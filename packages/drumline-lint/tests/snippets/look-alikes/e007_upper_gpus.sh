#!/usr/bin/env bash
# Night job on the shared node: only GPUs 4-7 are ours.
set -euo pipefail

cd "$(dirname "$(readlink -f "$0")")"

export CUDA_VISIBLE_DEVICES=${GPUS:-4,5,6,7}
IFS=, read -ra GPU_LIST <<< "$CUDA_VISIBLE_DEVICES"
NPROC=${#GPU_LIST[@]}

export OMP_NUM_THREADS=$(( $(nproc) / 2 / NPROC ))
export TORCH_HOME=/data/torch_home
export NCCL_P2P_DISABLE=0

EXP=${1:-pointnet_s3dis}
OUT=/data/runs/$EXP
mkdir -p "$OUT"

if pgrep -u "$USER" -f "torchrun.*$EXP" > /dev/null; then
    echo "$EXP is already running" >&2
    exit 1
fi

for g in "${GPU_LIST[@]}"; do
    used=$(nvidia-smi -i "$g" --query-gpu=memory.used --format=csv,noheader,nounits)
    if (( used > 500 )); then
        echo "GPU $g is busy ($used MiB)" >&2
        exit 1
    fi
done

echo "using $NPROC GPUs: $CUDA_VISIBLE_DEVICES"

torchrun \
    --standalone \
    --nproc_per_node="$NPROC" \
    train_seg3d.py \
    --exp "$EXP" \
    --data /data/s3dis \
    --batch-size 8 \
    --epochs 100 \
    --out "$OUT" 2>&1 | tee -a "$OUT/console.log"
