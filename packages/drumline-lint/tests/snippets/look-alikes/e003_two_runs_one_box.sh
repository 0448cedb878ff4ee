#!/usr/bin/env bash
# Ablation: with and without the auxiliary loss, side by side on the 8-GPU box.
set -uo pipefail

cd /work/depth
source env/bin/activate

DATA=${DATA:-/data/nyuv2}
ROOT=runs/ablation_$(date +%Y%m%d)
export OMP_NUM_THREADS=6

start() {
    local name=$1 gpus=$2 port=$3
    shift 3
    local out=$ROOT/$name
    mkdir -p "$out"
    CUDA_VISIBLE_DEVICES=$gpus torchrun \
        --nnodes=1 \
        --node_rank=0 \
        --nproc_per_node=4 \
        --master_addr=127.0.0.1 \
        --master_port="$port" \
        train_depth.py \
        --data "$DATA" \
        --out "$out" \
        --batch-size 8 \
        --epochs 60 \
        "$@" \
        > "$out/log.txt" 2>&1
}

start with_aux 0,1,2,3 29500 --aux-weight 0.4 &
a=$!
start no_aux 4,5,6,7 29501 --aux-weight 0.0 &
b=$!

wait "$a"; ra=$?
wait "$b"; rb=$?
echo "with_aux: $ra  no_aux: $rb"

if [[ $ra -eq 0 && $rb -eq 0 ]]; then
    python tools/compare.py "$ROOT/with_aux" "$ROOT/no_aux"
fi
