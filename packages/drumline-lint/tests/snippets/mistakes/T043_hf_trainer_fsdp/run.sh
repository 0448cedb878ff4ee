#!/usr/bin/env bash
export WANDB_PROJECT=mistral-sft
torchrun --standalone --nproc_per_node=8 finetune.py \
    --output_dir out/mistral-sft \
    --bf16 true \
    --num_train_epochs 3 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --gradient_checkpointing true \
    --learning_rate 1e-5 --lr_scheduler_type cosine --warmup_ratio 0.03 \
    --save_strategy no \
    --fsdp "full_shard auto_wrap" \
    --fsdp_config fsdp.json
