#!/usr/bin/env bash
# Train the recommender on the lab server (one machine, four A6000).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source venv/bin/activate

export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0,1,2,3}
IFS=',' read -ra DEVS <<< "$CUDA_VISIBLE_DEVICES"
NPROC=${#DEVS[@]}

export MASTER_ADDR=localhost
export MASTER_PORT=${MASTER_PORT:-29531}
export OMP_NUM_THREADS=$(( $(nproc) / NPROC ))
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export NCCL_P2P_LEVEL=NVL
export PYTHONPATH=src

STAMP=$(date +%m%d-%H%M)
OUT=runs/twotower-$STAMP
mkdir -p "$OUT"
cp configs/twotower.yaml "$OUT/"

if [[ ! -d data/interactions.parquet ]]; then
    python tools/prepare.py --raw data/raw --out data/interactions.parquet
fi

echo "training on $NPROC GPUs ($CUDA_VISIBLE_DEVICES), output in $OUT"
torchrun \
    --nnodes 1 \
    --node_rank 0 \
    --nproc_per_node "$NPROC" \
    --master_addr "$MASTER_ADDR" \
    --master_port "$MASTER_PORT" \
    src/train.py \
    --config "$OUT/twotower.yaml" \
    --interactions data/interactions.parquet \
    --output "$OUT" \
    "$@" 2>&1 | tee "$OUT/train.log"

python tools/evaluate.py --run "$OUT" --split test > "$OUT/test.json"
cat "$OUT/test.json"
