#!/bin/bash
# usage: MACHINE_RANK=0|1 ./run_accelerate.sh    (on each of the two machines, 8 GPUs each)
set -euo pipefail

: "${MACHINE_RANK:?set MACHINE_RANK to 0 or 1}"
GPUS_PER_NODE=8
MAIN_IP=10.20.0.4
MAIN_PORT=29500

export NCCL_SOCKET_IFNAME=ens5
export OMP_NUM_THREADS=8
export HF_HOME=/shared/hf

cd /shared/code/sdxl

accelerate launch \
    --multi_gpu \
    --num_machines 2 \
    --num_processes $GPUS_PER_NODE \
    --machine_rank "$MACHINE_RANK" \
    --main_process_ip "$MAIN_IP" \
    --main_process_port "$MAIN_PORT" \
    --mixed_precision bf16 \
    train_sdxl_lora.py \
    --pretrained_model_name_or_path /shared/models/sdxl-base \
    --dataset_name /shared/data/pokemon \
    --train_batch_size 2 \
    --max_train_steps 4000 \
    --output_dir /shared/out/lora
