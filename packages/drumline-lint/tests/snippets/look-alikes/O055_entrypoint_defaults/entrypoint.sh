#!/bin/bash
set -euo pipefail

NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-29500}
NPROC=${NPROC_PER_NODE:-$(nvidia-smi -L | wc -l)}

if [ "$NNODES" -gt 1 ] && [ "$MASTER_ADDR" = "127.0.0.1" ]; then
    echo "MASTER_ADDR must be set for $NNODES nodes" >&2
    exit 2
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
exec torchrun \
    --nnodes="$NNODES" \
    --node_rank="$NODE_RANK" \
    --nproc_per_node="$NPROC" \
    --master_addr="$MASTER_ADDR" \
    --master_port="$MASTER_PORT" \
    "$@"
