#!/bin/bash
# Two p4d instances with 8 GPUs each. Called by the init system of each one with
# NODE_INDEX (0/1) and LEADER_IP in the environment.
set -euo pipefail

: "${NODE_INDEX:?}" "${LEADER_IP:?}"
GPUS_PER_MACHINE=8
MACHINES=2

export HF_HOME=/fsx/hf
export OMP_NUM_THREADS=8
cd /fsx/diffusion

accelerate launch \
    --multi_gpu \
    --mixed_precision bf16 \
    --num_machines $MACHINES \
    --num_processes $GPUS_PER_MACHINE \
    --machine_rank "$NODE_INDEX" \
    --main_process_ip "$LEADER_IP" \
    --main_process_port 29505 \
    train_text_to_image.py \
    --dataset /fsx/laion-art \
    --resolution 512 \
    --train_batch_size 16 \
    --max_train_steps 100000 \
    --output_dir /fsx/out/t2i
