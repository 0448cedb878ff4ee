#!/usr/bin/env bash
# Three workstations with 2 GPUs each, no scheduler.  On each of them:
#   ./by_hand.sh 0     (on ws-01, which holds the rendezvous)
#   ./by_hand.sh 1     (on ws-02)
#   ./by_hand.sh 2     (on ws-03)
set -euo pipefail

if [[ $# -ne 1 || ! $1 =~ ^[0-2]$ ]]; then
    echo "usage: $0 NODE_RANK (0, 1 or 2)" >&2
    exit 2
fi
NODE_RANK=$1

cd /nfs/projects/denoise
source .venv/bin/activate

export OMP_NUM_THREADS=8
export NCCL_SOCKET_IFNAME=enp5s0

mkdir -p logs
torchrun \
    --nnodes=3 \
    --node_rank="$NODE_RANK" \
    --nproc_per_node=2 \
    --master_addr=ws-01 \
    --master_port=29500 \
    train_denoiser.py \
    --data /nfs/data/sidd \
    --out /nfs/projects/denoise/runs/current \
    2>&1 | tee "logs/node$NODE_RANK.log"
