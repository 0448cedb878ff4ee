#!/bin/bash
# Finetune on the four cards of this box.
set -euo pipefail

MODEL=${MODEL:-bert-base-cased}
TASK=${TASK:-mnli}
OUT=output/$TASK-$(date +%s)

export OMP_NUM_THREADS=4
export TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT"

torchrun finetune.py \
    --nproc_per_node=4 \
    --standalone \
    --model_name_or_path "$MODEL" \
    --task_name "$TASK" \
    --per_device_train_batch_size 32 \
    --learning_rate 2e-5 \
    --num_train_epochs 3 \
    --output_dir "$OUT"
