#!/usr/bin/env bash
# Started on every node by the scheduler; a node that goes away is waited for, up to three times.
set -euo pipefail

: "${RENDEZVOUS_HOST:?the first node of the job}"

export OMP_NUM_THREADS=4
export NCCL_DEBUG=WARN
export NCCL_PROTO=LL128  # <- unsafe-nccl-variable
export NCCL_SOCKET_IFNAME="${IFACE:-^lo,docker0}"

exec torchrun --nnodes 2:4 --nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS_HOST:29500" train.py "$@"
