#!/usr/bin/env bash
# Started on every node by the scheduler; a node that goes away is waited for, up to three times.
set -euo pipefail

: "${JOB_ID:?the scheduler sets it}"
: "${RENDEZVOUS_HOST:?the first node of the job}"
PORT=$((20000 + JOB_ID % 10000))

export OMP_NUM_THREADS=4
export NCCL_DEBUG=WARN
export NCCL_SOCKET_IFNAME="${IFACE:-^lo,docker0}"

exec torchrun \
    --nnodes 2:4 \
    --nproc-per-node 8 \
    --max-restarts 3 \
    --rdzv-backend c10d \
    --rdzv-id "$JOB_ID" \
    --rdzv-endpoint "$RENDEZVOUS_HOST:$PORT" \
    train.py --snapshot "/shared/$JOB_ID/snapshot.pt" "$@"
