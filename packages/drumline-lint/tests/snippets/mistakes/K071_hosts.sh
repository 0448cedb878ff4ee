#!/usr/bin/env bash
# Start the segmentation run on the lab machines.
set -euo pipefail

HOSTS=(gpu-a gpu-b gpu-c)
MASTER=${HOSTS[0]}
PORT=29544
REPO=/nfs/code/segment
NPROC=4

mkdir -p logs
for host in "${HOSTS[@]}"; do
  echo "starting on $host"
  ssh "$host" "cd $REPO && source .venv/bin/activate && \
    torchrun --nnodes=${#HOSTS[@]} --node_rank=0 --nproc_per_node=$NPROC \
      --master_addr=$MASTER --master_port=$PORT \
      train.py --config cfg/citys.yaml" > "logs/$host.log" 2>&1 &
done

wait
echo "all hosts finished"
