#!/bin/bash
set -uo pipefail
cd "$(dirname "$0")/.."
source venv/bin/activate
export OMP_NUM_THREADS=6
export PYTHONUNBUFFERED=1

out=runs/$(date +%Y%m%d_%H%M%S)
mkdir -p "$out"

torchrun --standalone --nproc_per_node=4 train.py --out "$out" 2>&1 | tee "$out/train.log"
status=${PIPESTATUS[0]}

if (( status == 0 )); then
    torchrun --standalone --nproc_per_node=4 evaluate.py --weights "$out/last.pt" 2>&1 | tee "$out/eval.log"
    status=${PIPESTATUS[0]}
fi
exit "$status"
