#!/bin/bash
# usage: ./docker_train.sh <node_rank>    on host 10.0.0.5 (rank 0) and 10.0.0.6 (rank 1)
set -euo pipefail

NODE_RANK=$1
MASTER_ADDR=10.0.0.5
MASTER_PORT=29500
IMAGE=team/lidar-seg:1.2
NAME=lidar-train-$NODE_RANK

docker rm -f "$NAME" >/dev/null 2>&1 || true
docker pull "$IMAGE"

docker run --name "$NAME" \
    --gpus all \
    --shm-size=32g \
    --ulimit memlock=-1 \
    --ulimit stack=67108864 \
    -p $MASTER_PORT:$MASTER_PORT \
    -v /data/semantickitti:/data:ro \
    -v /nfs/ckpt/lidar:/ckpt \
    -e NCCL_DEBUG=INFO \
    -e OMP_NUM_THREADS=6 \
    "$IMAGE" \
    torchrun --nnodes=2 --nproc_per_node=4 \
        --node_rank="$NODE_RANK" \
        --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \
        train_lidar.py --data /data --ckpt /ckpt --batch 8
