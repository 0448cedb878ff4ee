#!/bin/bash
# usage: start_node.sh <node_rank>; MASTER is the host name of node 0
set -euo pipefail

NODE_RANK=${1:?node rank}
MASTER=${MASTER:-dl-node-0}
IMAGE=ghcr.io/acme/translation:1.9.0

docker run --rm \
    --name "nmt-$NODE_RANK" \
    --gpus all \
    --shm-size=32g \
    --ulimit memlock=-1 \
    -e NCCL_DEBUG=WARN \
    -e OMP_NUM_THREADS=8 \
    -v /mnt/nfs/wmt:/data:ro \
    -v /mnt/nfs/nmt-runs:/runs \
    "$IMAGE" \
    torchrun \
        --nnodes=2 \
        --node_rank="$NODE_RANK" \
        --nproc_per_node=8 \
        --master_addr="$MASTER" \
        --master_port=29560 \
        train.py --data /data --save /runs/big
