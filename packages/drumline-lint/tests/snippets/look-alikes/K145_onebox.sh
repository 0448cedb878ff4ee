#!/usr/bin/env bash
# Train on the 4-GPU workstation; a second run may be going on, hence the port argument.
set -euo pipefail

PORT=${1:-29500}
RUN=${2:-baseline}

cd "$(dirname "$0")/.."
source .venv/bin/activate

export OMP_NUM_THREADS=6
export MASTER_ADDR=127.0.0.1
export MASTER_PORT=$PORT
export NCCL_DEBUG=WARN

mkdir -p "runs/$RUN"
torchrun \
  --nnodes=1 --node_rank=0 \
  --nproc_per_node=4 \
  --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \
  train.py --out "runs/$RUN" 2>&1 | tee "runs/$RUN/log.txt"
