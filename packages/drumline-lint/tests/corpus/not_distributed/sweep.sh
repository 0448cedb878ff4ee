#!/usr/bin/env bash
# Tries learning rates one after another, each on one GPU of this machine.
set -euo pipefail
cd "$(dirname "$0")"

gpu=0
for rate in 0.1 0.03 0.01; do
    CUDA_VISIBLE_DEVICES=$gpu python single_gpu.py --epochs 3 > "rate-$rate.log" 2>&1 &
    gpu=$((gpu + 1))
done
wait
port=8080
python serve.py --port "$port" --weights best.pt
