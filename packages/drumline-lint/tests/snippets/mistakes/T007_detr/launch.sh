#!/usr/bin/env bash
# usage on each node: NODE_RANK=<0|1> ./launch.sh
set -e
: "${NODE_RANK:?set NODE_RANK}"
export MASTER_ADDR=${MASTER_ADDR:-10.0.4.11}
export MASTER_PORT=${MASTER_PORT:-29600}

torchrun \
  --nnodes=2 \
  --node_rank="$NODE_RANK" \
  --nproc_per_node=8 \
  --master_addr="$MASTER_ADDR" \
  --master_port="$MASTER_PORT" \
  train.py --coco /mnt/nfs/coco --epochs 50 "$@"
