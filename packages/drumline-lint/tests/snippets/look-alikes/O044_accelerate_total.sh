#!/bin/bash
# usage: ./launch.sh <machine rank>   on each of the two machines
set -euo pipefail

RANK=${1:?machine rank 0 or 1}
NUM_MACHINES=2
GPUS=8
export NCCL_SOCKET_IFNAME=ens5
export OMP_NUM_THREADS=8
export HF_HOME=/shared/hf

cd /shared/code/controlnet

accelerate launch \
    --multi_gpu \
    --num_machines "$NUM_MACHINES" \
    --num_processes $((NUM_MACHINES * GPUS)) \
    --machine_rank "$RANK" \
    --main_process_ip 10.20.0.4 \
    --main_process_port 29500 \
    --mixed_precision bf16 \
    train_controlnet.py \
    --pretrained_model_name_or_path /shared/models/sd15 \
    --dataset_name /shared/data/fill50k \
    --train_batch_size 4 \
    --output_dir /shared/out/controlnet
