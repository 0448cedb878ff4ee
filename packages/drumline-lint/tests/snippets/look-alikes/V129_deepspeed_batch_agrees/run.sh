#!/usr/bin/env bash
set -euo pipefail

cd "$(dirname "$0")"
source .venv/bin/activate

export TOKENIZERS_PARALLELISM=false
RUN=opt13b-$(date +%m%d)
mkdir -p "runs/$RUN"
cp ds_config.json "runs/$RUN/"

printf '%s slots=8\n' gpu-a01 gpu-a02 > "runs/$RUN/hostfile"

deepspeed --hostfile "runs/$RUN/hostfile" --master_port 29530 \
    pretrain.py \
    --model facebook/opt-13b \
    --dataset data/pubmed.bin \
    --seq-len 2048 \
    --output "runs/$RUN" \
    --deepspeed \
    --deepspeed_config ds_config.json \
    2>&1 | tee "runs/$RUN/train.log"
