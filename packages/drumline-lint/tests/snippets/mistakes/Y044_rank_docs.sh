#!/usr/bin/env bash
# Train the document ranker on all eight GPUs of this machine.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$HERE"

if [[ ! -d .venv ]]; then
    echo "run make venv first" >&2
    exit 1
fi
source .venv/bin/activate

DATA=${1:?usage: rank_docs.sh DATA_DIR [OUT_DIR]}
OUT=${2:-runs/ranker-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$OUT"

export OMP_NUM_THREADS=8
export TOKENIZERS_PARALLELISM=false

torchrun train_ranker.py \
    --standalone \
    --nproc_per_node=8 \
    --data "$DATA" \
    --out "$OUT" \
    --batch-size 32 \
    --lr 1e-5 \
    2>&1 | tee "$OUT/train.log"
