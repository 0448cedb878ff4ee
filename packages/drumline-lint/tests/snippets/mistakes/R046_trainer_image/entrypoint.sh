#!/bin/bash
set -eu

NPROC=${NPROC_PER_NODE:-$(nvidia-smi -L | wc -l)}
echo "starting $NPROC workers on $(hostname)"

torchrun --nnodes="${NNODES:-1}" --nproc-per-node="$NPROC" \
    --node-rank="${NODE_RANK:-0}" \
    --master-addr="${MASTER_ADDR:-127.0.0.1}" --master-port="${MASTER_PORT:-29400}" \
    /app/train.py --ckpt-dir /ckpt "$@"
