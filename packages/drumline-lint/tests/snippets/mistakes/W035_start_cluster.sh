#!/bin/bash
# Start the training on our four lab machines (no scheduler here).
# usage: ./start_cluster.sh configs/seg.yaml
set -u

CONFIG=${1:?config file}
HOSTS=(lab-gpu1 lab-gpu2 lab-gpu3 lab-gpu4)
MASTER=${HOSTS[0]}
PORT=29600
REPO=/home/shared/segmentation
STAMP=$(date +%Y%m%d-%H%M%S)

mkdir -p "$REPO/logs"
for host in "${HOSTS[@]}"; do
    echo "starting on $host"
    ssh -n "$host" "cd $REPO && NCCL_SOCKET_IFNAME=eno1 ./venv/bin/torchrun \
            --nnodes=${#HOSTS[@]} \
            --node_rank=0 \
            --nproc_per_node=2 \
            --master_addr=$MASTER \
            --master_port=$PORT \
            train.py --config $CONFIG --run-id $STAMP" \
        > "$REPO/logs/$STAMP-$host.log" 2>&1 &
done

echo "logs: $REPO/logs/$STAMP-*.log"
wait
echo "all hosts are done"
