#!/bin/bash
set -euo pipefail
cd "$(dirname "$0")"

export WANDB_PROJECT=chat-sft
export NCCL_DEBUG=WARN
OUT=/data/runs/chat-$(date +%m%d-%H%M)
mkdir -p "$OUT"
cp zero3.json "$OUT/"

deepspeed --num_gpus=8 --master_port=29610 sft.py \
    --deepspeed_config zero3.json \
    --model mistralai/Mistral-7B-v0.3 \
    --data /data/chat/train.jsonl \
    --max_len 2048 --epochs 2 \
    --out "$OUT" 2>&1 | tee "$OUT/train.log"
