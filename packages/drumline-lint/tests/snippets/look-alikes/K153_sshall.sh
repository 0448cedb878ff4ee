#!/usr/bin/env bash
set -euo pipefail

NODES=(10.1.0.21 10.1.0.22 10.1.0.23)
NNODES=${#NODES[@]}
MASTER_ADDR=${NODES[0]}
MASTER_PORT=29520
DIR=/srv/lidar

mkdir -p logs
pids=()
for i in "${!NODES[@]}"; do
  ssh -o BatchMode=yes "train@${NODES[$i]}" "cd $DIR && \
    OMP_NUM_THREADS=8 venv/bin/torchrun \
      --nnodes=$NNODES --node_rank=$i --nproc_per_node=4 \
      --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT \
      train.py --cfg cfg/waymo.yaml" > "logs/node$i.log" 2>&1 &
  pids+=($!)
done

status=0
for p in "${pids[@]}"; do
  wait "$p" || status=1
done
exit "$status"
