#!/bin/bash
set -euo pipefail

# cards 0 and 1 are the A6000s, the other two belong to the robotics group
export CUDA_DEVICE_ORDER=PCI_BUS_ID
export CUDA_VISIBLE_DEVICES=0,1
export OMP_NUM_THREADS=6

ROOT=/mnt/ssd/sceneflow
EXP=stereo_raft_$(git rev-parse --short HEAD)
mkdir -p "exp/$EXP"
git diff > "exp/$EXP/uncommitted.patch"

torchrun \
    --standalone \
    --nproc_per_node=4 \
    train_stereo.py \
    --dataset "$ROOT" \
    --image_size 320 720 \
    --batch_size 4 \
    --num_steps 200000 \
    --name "$EXP" 2>&1 | tee "exp/$EXP/train.log"
