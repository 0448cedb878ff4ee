#!/bin/bash
# Runs on every node, started as:  pdsh -w node[01-02] /shared/unet3d/run_node.sh
set -e

HEAD=node01
NNODES=2
NPROC=$(nvidia-smi -L | wc -l)
RUN_ID=$RANDOM

cd /shared/unet3d
source venv/bin/activate

export NCCL_IB_DISABLE=0
export NCCL_SOCKET_IFNAME=bond0
export OMP_NUM_THREADS=$(( $(nproc) / NPROC ))

LOG=/shared/unet3d/logs/$(hostname -s)
mkdir -p "$LOG"

if [ ! -d /local/kits19 ]; then
    echo "$(hostname -s): staging data"
    mkdir -p /local/kits19
    tar -xf /shared/data/kits19_npy.tar -C /local/kits19
fi

ulimit -n 65536

echo "$(hostname -s): $NPROC gpus, head $HEAD"

exec torchrun \
    --nnodes=$NNODES \
    --nproc_per_node=$NPROC \
    --rdzv_backend=c10d \
    --rdzv_endpoint=$HEAD:29400 \
    --rdzv_id=unet3d_$RUN_ID \
    --max_restarts=0 \
    --log_dir "$LOG" \
    main.py \
    --data_dir /local/kits19 \
    --save_ckpt_path /shared/unet3d/ckpt.pth \
    --epochs 2000 \
    --batch_size 2 \
    --learning_rate 0.8 \
    --lr_warmup_epochs 200 \
    --evaluate_every 40
