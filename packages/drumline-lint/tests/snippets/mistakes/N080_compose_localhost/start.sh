#!/bin/bash
set -e
cd /app
torchrun --nnodes=2 --nproc_per_node=2 --node_rank="$NODE_RANK" \
    --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \
    train_net.py --config-file configs/coco/panoptic.yaml
