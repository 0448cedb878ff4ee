#!/usr/bin/env bash
# Start the detector on the three lab machines.
set -euo pipefail

HOSTS=(vision01 vision02 vision03)
MASTER=${HOSTS[0]}
PORT=29650
REPO=/home/shared/detector
STAMP=$(date +%Y%m%d-%H%M%S)

mkdir -p "logs/$STAMP"

for host in "${HOSTS[@]}"; do
    echo "starting on $host"
    ssh "$host" "cd $REPO && source .venv/bin/activate && \
        torchrun \
            --nnodes=${#HOSTS[@]} \
            --node_rank=0 \
            --nproc_per_node=2 \
            --master_addr=$MASTER \
            --master_port=$PORT \
            tools/train.py configs/fcos_r50.py" \
        > "logs/$STAMP/$host.log" 2>&1 &
done

wait
echo "all hosts finished, logs are in logs/$STAMP"
