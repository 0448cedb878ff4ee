#!/usr/bin/env bash
# Two-machine training of the click model.
set -euo pipefail

NODES="10.0.3.11 10.0.3.12"
MASTER_ADDR=10.0.3.11
MASTER_PORT=29510
NNODES=2
GPUS=4
WORKDIR=/srv/clickmodel
LOGDIR=$WORKDIR/logs/$(date +%Y%m%d-%H%M)

rank=0
for node in $NODES; do
  echo "[$node] rank $rank"
  ssh -o BatchMode=yes "train@$node" \
    "mkdir -p $LOGDIR && cd $WORKDIR && \
     venv/bin/torchrun --nnodes=$NNODES --node_rank=$rank --nproc_per_node=$GPUS \
       --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT \
       train.py --days 30 > $LOGDIR/node$rank.log 2>&1"
  rank=$((rank + 1))
done

wait
echo "done, logs in $LOGDIR"
