#!/bin/bash
# 1 node, 8 GPUs, 64 cores
set -e

CORES=$(nproc)
export OMP_NUM_THREADS=$CORES
export MKL_NUM_THREADS=$CORES
export TOKENIZERS_PARALLELISM=false

DATA=/nvme/c4/tokenized
OUT=/nvme/out/t5-small
mkdir -p "$OUT"

echo "cores: $CORES"
nvidia-smi --query-gpu=index,name,memory.total --format=csv

torchrun --standalone --nproc_per_node=8 pretrain_t5.py \
  --data_dir "$DATA" \
  --model_size small \
  --seq_len 512 \
  --batch_size 64 \
  --lr 1e-2 \
  --optimizer adafactor \
  --warmup 10000 \
  --dataloader_workers 4 \
  --total_steps 250000 \
  --output_dir "$OUT"
