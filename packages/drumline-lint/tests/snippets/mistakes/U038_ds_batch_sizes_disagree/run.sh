#!/bin/bash
# Whisper fine-tuning on one 4-GPU machine.
set -e
cd "$(dirname "$0")"

export NCCL_P2P_LEVEL=NVL
export WANDB_PROJECT=whisper-de

deepspeed --num_gpus=4 --master_port=29600 train.py \
    --deepspeed \
    --deepspeed_config ds_config.json \
    --model openai/whisper-large-v3 \
    --manifest data/commonvoice_de.tsv \
    --output out/whisper-de
