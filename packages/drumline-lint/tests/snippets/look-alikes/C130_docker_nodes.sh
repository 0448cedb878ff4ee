#!/bin/bash
set -euo pipefail
NODE_RANK=${1:?node rank}
MASTER=${2:?host name of node 0}
IMAGE=registry.example.com/nmt/train:5

exec docker run --rm \
    --name "nmt-$NODE_RANK" \
    --gpus all \
    --network=host \
    --ipc=host \
    --ulimit memlock=-1 \
    --ulimit stack=67108864 \
    --device=/dev/infiniband \
    -e OMP_NUM_THREADS=8 \
    -v /mnt/nfs/wmt:/data:ro \
    -v /mnt/nfs/runs:/runs \
    "$IMAGE" \
    torchrun \
        --nnodes=2 --node_rank="$NODE_RANK" --nproc_per_node=8 \
        --master_addr="$MASTER" --master_port=29560 \
        train.py --data /data --out /runs/nmt
