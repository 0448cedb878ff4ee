#!/bin/bash
set -euo pipefail

IMAGE=registry.local/vision/maskrcnn:2.3
DATA=/data/coco2017
OUT=$PWD/output
NAME=maskrcnn-$USER
mkdir -p "$OUT"

docker pull "$IMAGE"
docker rm -f "$NAME" 2>/dev/null || true

docker run -d \
    --name "$NAME" \
    --gpus all \
    --ulimit memlock=-1 \
    --ulimit stack=67108864 \
    -e OMP_NUM_THREADS=4 \
    -v "$DATA:/data:ro" \
    -v "$OUT:/output" \
    "$IMAGE" \
    torchrun --standalone --nproc_per_node=8 train_net.py \
        --data /data --output /output --num-workers 8 --batch-size 16

docker logs -f "$NAME"
