#!/bin/bash
set -eo pipefail

MODEL=${MODEL:-bert-large-uncased}
TASK=${TASK:-mnli}
GPUS=${GPUS:-8}
OUT=output/$TASK/$(basename "$MODEL")

mkdir -p "$OUT"
export TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=2
export WANDB_PROJECT=glue-sweep

echo "task=$TASK model=$MODEL gpus=$GPUS"

torchrun run_glue_ddp.py \
  --nproc_per_node $GPUS \
  --master_port 29505 \
  --model_name_or_path "$MODEL" \
  --task_name "$TASK" \
  --max_seq_length 128 \
  --per_device_train_batch_size 32 \
  --learning_rate 2e-5 \
  --num_train_epochs 3 \
  --output_dir "$OUT" 2>&1 | tee "$OUT/train.log"

grep -E "eval_accuracy|eval_loss" "$OUT/train.log" | tail -n 2
