#!/bin/bash
# usage: finetune.sh [gpu list] [port]
set -euo pipefail
GPUS=${1:-6,7}
PORT=${2:-29613}

unset CUDA_VISIBLE_DEVICES
export TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=8
OUT=out/support-$(date +%m%d-%H%M)
mkdir -p "$OUT"

deepspeed --include "localhost:$GPUS" --master_port "$PORT" \
    finetune.py \
    --model_name_or_path /models/base-7b \
    --data_path data/dialogs.jsonl \
    --output_dir "$OUT" \
    --deepspeed configs/zero2.json
