#!/bin/bash
export OMP_NUM_THREADS=4
export HF_HUB_OFFLINE=1

MODEL=checkpoints/vlm-7b
TASKS=vqa_val,scene_qa
OUTPUT=results/$(basename $MODEL)
mkdir -p $OUTPUT

accelerate launch \
    --num_processes=4 \   # one per GPU
    --num_machines=1 \
    --mixed_precision=bf16 \
    -m vlm_eval.run \
    --model $MODEL \
    --tasks $TASKS \
    --batch_size 1 \
    --log_samples \
    --output_path $OUTPUT

echo "results are in $OUTPUT"
