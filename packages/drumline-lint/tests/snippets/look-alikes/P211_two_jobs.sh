#!/bin/bash
# Ablation: with and without mixup, each on half of the 8-GPU node.
set -e

cd /home/mara/vision-ablation
source .venv/bin/activate

BASE_PORT=29600
OUT=ablation/$(date +%F)
mkdir -p "$OUT"
export OMP_NUM_THREADS=4

launch() {
    local name=$1 gpus=$2 port=$3
    shift 3
    CUDA_VISIBLE_DEVICES="$gpus" torchrun \
        --nnodes=1 \
        --nproc_per_node=4 \
        --master_addr=127.0.0.1 \
        --master_port="$port" \
        train.py \
        --data /mnt/ssd/imagenet100 \
        --arch convnext_nano \
        --epochs 100 \
        --batch-size 128 \
        --output "$OUT/$name" \
        "$@" > "$OUT/$name.log" 2>&1
}

pids=()
launch mixup   0,1,2,3 "$BASE_PORT"          --mixup 0.8 &
pids+=($!)
launch nomixup 4,5,6,7 "$((BASE_PORT + 1))"  --mixup 0.0 &
pids+=($!)

failed=0
for pid in "${pids[@]}"; do
    wait "$pid" || failed=$((failed + 1))
done

if (( failed > 0 )); then
    echo "$failed of ${#pids[@]} runs failed, see $OUT/*.log" >&2
    exit 1
fi
grep -h "best acc" "$OUT"/*.log
