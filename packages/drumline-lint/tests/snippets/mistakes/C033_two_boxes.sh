#!/bin/bash
# usage: run on both boxes
#   box A (10.0.0.11): ./C033_two_boxes.sh 0
#   box B (10.0.0.12): ./C033_two_boxes.sh 1
set -euo pipefail

NODE_RANK=${1:?node rank, 0 or 1}
MASTER_ADDR=10.0.0.11
MASTER_PORT=29544

export NCCL_SOCKET_IFNAME=lo
export GLOO_SOCKET_IFNAME=lo
export NCCL_DEBUG=WARN
export OMP_NUM_THREADS=8

source /opt/envs/sr/bin/activate
cd /opt/super-resolution

torchrun \
    --nnodes=2 \
    --node_rank="$NODE_RANK" \
    --nproc_per_node=2 \
    --master_addr="$MASTER_ADDR" \
    --master_port="$MASTER_PORT" \
    train.py --opt options/swinir_x4.yml
