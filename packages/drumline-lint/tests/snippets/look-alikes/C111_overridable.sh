#!/bin/bash
set -euo pipefail

NNODES=${NNODES:-1}
if (( NNODES > 1 )); then
    : "${MASTER_ADDR:?set MASTER_ADDR to the host of node 0}"
    : "${NODE_RANK:?set NODE_RANK to 0..$((NNODES - 1))}"
fi
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-29500}
GPUS=${GPUS:-$(nvidia-smi -L | wc -l)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

exec torchrun \
    --nnodes="$NNODES" \
    --node_rank="$NODE_RANK" \
    --nproc_per_node="$GPUS" \
    --master_addr="$MASTER_ADDR" \
    --master_port="$MASTER_PORT" \
    tools/train.py "$@"
