#!/bin/bash
# usage: ./docker_train.sh <node_rank>    on 10.0.0.5 (0) and 10.0.0.6 (1)
set -euo pipefail

NODE_RANK=${1:?node rank}
IMAGE=team/point-det:2.0
NAME=pdet-$NODE_RANK

docker rm -f "$NAME" >/dev/null 2>&1 || true

docker run --name "$NAME" \
    --gpus all \
    --network host \
    --ipc host \
    --ulimit memlock=-1 \
    --ulimit stack=67108864 \
    -v /data/nuscenes:/data:ro \
    -v /nfs/ckpt/pdet:/ckpt \
    -e NCCL_SOCKET_IFNAME=eno2 \
    -e OMP_NUM_THREADS=6 \
    "$IMAGE" \
    torchrun --nnodes=2 --nproc_per_node=4 \
        --node_rank="$NODE_RANK" \
        --master_addr=10.0.0.5 --master_port=29500 \
        train_det.py --data /data --ckpt /ckpt
