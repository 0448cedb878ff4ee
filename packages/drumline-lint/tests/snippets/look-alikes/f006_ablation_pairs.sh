#!/usr/bin/env bash
# Ablations of the augmentation policy for bird-sound classification.
# Two jobs side by side on the last four GPUs of the shared server.
set -uo pipefail

OUT=runs/birdclef_ablation
mkdir -p "$OUT"
export OMP_NUM_THREADS=6
export WANDB_MODE=offline

VARIANTS=(none specaug mixup specaug+mixup noise noise+mixup)

run_one() {
    local gpus=$1 variant=$2
    local dir=$OUT/$variant
    if [ -f "$dir/final.json" ]; then
        echo "$variant is done already"
        return
    fi
    mkdir -p "$dir"
    echo "$(date '+%F %T') start $variant on $gpus"
    CUDA_VISIBLE_DEVICES=$gpus torchrun --standalone --nproc_per_node=2 \
        train_birds.py \
        --augment "$variant" \
        --epochs 40 \
        --batch-size 48 \
        --seed 2023 \
        --out "$dir" \
        > "$dir/log.txt" 2>&1
    echo "$(date '+%F %T') end $variant, status $?"
}

for ((i = 0; i < ${#VARIANTS[@]}; i += 2)); do
    run_one 4,5 "${VARIANTS[i]}" &
    if (( i + 1 < ${#VARIANTS[@]} )); then
        run_one 6,7 "${VARIANTS[i + 1]}" &
    fi
    wait
done

python tools/collect.py "$OUT" --table "$OUT/table.md"
