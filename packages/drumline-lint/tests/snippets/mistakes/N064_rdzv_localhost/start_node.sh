#!/bin/bash
# run me on node-a and on node-b
set -euo pipefail
source /opt/venvs/flow/bin/activate
cd /mnt/code/optical-flow

export OMP_NUM_THREADS=8
export NCCL_SOCKET_IFNAME=eno1
export NCCL_DEBUG=WARN

DATASET=${1:-flyingthings}
STAGE=${2:-things}
LOG=/mnt/code/logs/$(hostname)-$STAGE.log

echo "joining from $(hostname)" | tee "$LOG"
torchrun \
    --nnodes=2 \
    --nproc_per_node=4 \
    --rdzv_id=raft-$STAGE \
    --rdzv_backend=c10d \
    --rdzv_endpoint=localhost:29400 \
    train_raft.py --stage "$STAGE" --dataset "$DATASET" \
    --num_steps 100000 --batch_size 6 2>&1 | tee -a "$LOG"
