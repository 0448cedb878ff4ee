#!/bin/bash
# Start on both machines (2 machines, 8 x A100 each):
#   gpu-a$ ./accelerate_two_machines.sh 0
#   gpu-b$ ./accelerate_two_machines.sh 1
set -euo pipefail

MACHINE_RANK=${1:?machine rank}
MASTER=gpu-a
PORT=29600
MACHINES=2
GPUS_EACH=8

export NCCL_SOCKET_IFNAME=ib0
export HF_HOME=/shared/hf
export OMP_NUM_THREADS=8

accelerate launch \
    --multi_gpu \
    --num_machines "$MACHINES" \
    --num_processes $((MACHINES * GPUS_EACH)) \
    --machine_rank "$MACHINE_RANK" \
    --main_process_ip "$MASTER" \
    --main_process_port "$PORT" \
    --mixed_precision bf16 \
    finetune.py \
    --model /shared/models/llama-8b \
    --dataset /shared/sft/train.jsonl \
    --output_dir /shared/runs/llama-8b-sft
