#!/bin/bash
set -eu

export MASTER_ADDR=192.168.10.11
export PORT=29400
NODES="192.168.10.11 192.168.10.12"
WORKDIR=/mnt/share/yolo

NNODES=$(echo $NODES | wc -w)
rank=0
pids=()

for node in $NODES; do
    ssh ubuntu@$node 'cd /mnt/share/yolo && \
        . .venv/bin/activate && \
        torchrun --nnodes=$NNODES --node_rank=$rank --nproc_per_node=4 \
            --master_addr=$MASTER_ADDR --master_port=$PORT \
            train.py --data coco.yaml --cfg yolov5m.yaml --batch 64' \
        > $WORKDIR/log_$node.txt 2>&1 &
    pids+=($!)
    rank=$((rank + 1))
done

status=0
for pid in "${pids[@]}"; do
    wait "$pid" || status=1
done

tail -n 3 $WORKDIR/log_*.txt
exit $status
