#!/bin/bash
# Instruction tuning on the two 8-GPU boxes (16 GPUs).
# Run on both, with the machine's number:   ./tune.sh 0   /   ./tune.sh 1
set -euo pipefail

MACHINE_RANK=${1:?give 0 or 1}
MAIN_IP=10.20.0.11
MAIN_PORT=29511
GPUS_PER_MACHINE=8

export NCCL_SOCKET_IFNAME=bond0
export WANDB_PROJECT=instruct
export TOKENIZERS_PARALLELISM=false

cd /mnt/nfs/instruct
source .venv/bin/activate

found=$(nvidia-smi --list-gpus | wc -l)
if [ "$found" -ne "$GPUS_PER_MACHINE" ]; then
    echo "expected $GPUS_PER_MACHINE GPUs, found $found" >&2
    exit 1
fi

accelerate launch \
    --multi_gpu \
    --num_machines 2 \
    --num_processes "$GPUS_PER_MACHINE" \
    --machine_rank "$MACHINE_RANK" \
    --main_process_ip "$MAIN_IP" \
    --main_process_port "$MAIN_PORT" \
    --mixed_precision bf16 \
    --dynamo_backend no \
    tune.py \
        --base /mnt/nfs/models/qwen-7b \
        --data /mnt/nfs/data/instruct.jsonl \
        --per-device-batch 4 \
        --out /mnt/nfs/runs/instruct
