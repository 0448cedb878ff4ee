#!/usr/bin/env bash
# usage on both 8xA100 machines: MACHINE_RANK={0,1} ./start.sh
set -euo pipefail

: "${MACHINE_RANK:?set MACHINE_RANK}"
HEAD=10.20.0.11

export NCCL_SOCKET_IFNAME=bond0
export OMP_NUM_THREADS=8
export HF_HOME=/nfs/hf

test "$(nvidia-smi -L | wc -l)" -eq 8

accelerate launch \
    --config_file fsdp_2x8.yaml \
    --machine_rank "$MACHINE_RANK" \
    --main_process_ip "$HEAD" \
    run_dpo.py \
    --model /nfs/models/sft-8b \
    --dataset /nfs/data/preferences \
    --beta 0.1 \
    --learning_rate 5e-7 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 8 \
    --num_train_epochs 1 \
    --save_steps 200 \
    --output_dir /nfs/runs/dpo-8b
