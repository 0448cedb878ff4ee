#!/bin/bash
set -euo pipefail
docker build -t keypoints:dev .
docker run --rm --gpus all --ipc=host --ulimit memlock=-1 \
    -v /data/keypoints:/data:ro -v "$PWD/runs:/runs" keypoints:dev --epochs 40
