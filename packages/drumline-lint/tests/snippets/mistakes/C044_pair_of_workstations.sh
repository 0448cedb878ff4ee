#!/bin/bash
# Run on ws1 and on ws2, with NODE_RANK=0 and NODE_RANK=1.
set -euo pipefail

NODE_RANK=${NODE_RANK:?set to 0 on ws1 and 1 on ws2}
export NCCL_SOCKET_IFNAME=enp5s0
export GLOO_SOCKET_IFNAME=enp5s0
export OMP_NUM_THREADS=8

cd "$HOME/nerf"
source venv/bin/activate

torchrun \
    --standalone \
    --nnodes=2 \
    --node_rank="$NODE_RANK" \
    --nproc_per_node=2 \
    --master_addr=ws1.lan \
    --master_port=29533 \
    train_nerf.py \
    --scenes /mnt/nas/scenes \
    --rays-per-batch 8192 \
    --out /mnt/nas/nerf-runs
