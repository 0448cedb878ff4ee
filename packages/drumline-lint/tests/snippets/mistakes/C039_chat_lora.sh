#!/bin/bash
set -euo pipefail

# 0-5 are used by the inference servers
export CUDA_VISIBLE_DEVICES=6,7
export TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=8

BASE=/models/Qwen2.5-7B-Instruct
DATA=data/support_dialogs.jsonl
OUT=out/support-lora-$(date +%m%d)
mkdir -p "$OUT"

deepspeed --num_gpus=2 --master_port=29613 \
    finetune.py \
    --model_name_or_path "$BASE" \
    --data_path "$DATA" \
    --output_dir "$OUT" \
    --lora_rank 32 \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 8 \
    --deepspeed configs/zero2.json
