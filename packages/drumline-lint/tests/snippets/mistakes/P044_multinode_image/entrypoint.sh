#!/usr/bin/env bash
# NNODES, NODE_RANK and MASTER_ADDR come from the scheduler.
set -euo pipefail

: "${NNODES:?}" "${NODE_RANK:?}" "${MASTER_ADDR:?}"
CONFIG=$1

ulimit -l unlimited || true
nvidia-smi --query-gpu=index,name,memory.total --format=csv

exec torchrun \
    --nnodes="$NNODES" \
    --node_rank="$NODE_RANK" \
    --nproc_per_node="${GPUS_PER_NODE:-8}" \
    --master_addr="$MASTER_ADDR" \
    --master_port="${MASTER_PORT:-29400}" \
    src/train.py --config "$CONFIG" --output "/mnt/shared/${JOB_NAME:-run}"
