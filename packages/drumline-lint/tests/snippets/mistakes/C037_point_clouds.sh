#!/bin/bash
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
source .venv/bin/activate

NGPU=8
export OMP_NUM_THREADS=$(nproc)
export MKL_NUM_THREADS=$(nproc)
export PYTHONPATH=$PWD:${PYTHONPATH:-}

SPLIT=${SPLIT:-train}
TAG=$(date +%Y-%m-%d)_pointnext
mkdir -p "runs/$TAG"
cp configs/pointnext_xl.yaml "runs/$TAG/"

torchrun --standalone --nproc_per_node=$NGPU \
    segment3d/train.py \
    --config "runs/$TAG/pointnext_xl.yaml" \
    --split "$SPLIT" \
    --voxel 0.02 \
    --workers 6 \
    --out "runs/$TAG"
