#!/bin/bash
# usage on each of the two boxes: ./launch.sh <machine number, 0 or 1>
set -e

RANK_OF_BOX=$1
if [ -z "$RANK_OF_BOX" ]; then
    echo "usage: $0 0|1" >&2
    exit 2
fi

export NCCL_SOCKET_IFNAME=enp65s0f0
export NCCL_IB_HCA=mlx5
export HF_DATASETS_CACHE=/nfs/cache/datasets
export TOKENIZERS_PARALLELISM=false

source /nfs/envs/rlhf/bin/activate
cd /nfs/rlhf

BOXES=2
GPUS=8

accelerate launch \
    --multi_gpu \
    --num_machines $BOXES \
    --num_processes $((BOXES * GPUS)) \
    --machine_rank "$RANK_OF_BOX" \
    --main_process_ip 192.168.40.2 \
    --main_process_port 29650 \
    --mixed_precision bf16 \
    --dynamo_backend no \
    reward_model.py \
        --pairs /nfs/data/preferences.jsonl \
        --per-device-batch 8 \
        --out /nfs/runs/reward
