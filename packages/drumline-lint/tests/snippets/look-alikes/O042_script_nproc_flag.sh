#!/bin/bash
set -eo pipefail

MODEL=${MODEL:-google/flan-t5-base}
OUT=out/$(basename "$MODEL")-samsum
mkdir -p "$OUT"
echo "model $MODEL -> $OUT"

export TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=4
export HF_HOME=/data/hf

torchrun \
  --standalone \
  --nproc_per_node=8 \
  run_summarization.py \
  --model_name_or_path "$MODEL" \
  --dataset_name samsum \
  --num_proc 16 \
  --per_device_train_batch_size 8 \
  --gradient_accumulation_steps 2 \
  --learning_rate 5e-5 \
  --num_train_epochs 3 \
  --predict_with_generate \
  --output_dir "$OUT" 2>&1 | tee "$OUT/log.txt"
