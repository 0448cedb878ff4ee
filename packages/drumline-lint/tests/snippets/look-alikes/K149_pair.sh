#!/usr/bin/env bash
# Baseline and ablation side by side on one 4-GPU host.
set -euo pipefail

cd /srv/exp/contrastive
source env/bin/activate
export OMP_NUM_THREADS=8
mkdir -p out/base out/noaug

CUDA_VISIBLE_DEVICES=0,1 torchrun --nnodes=1 --nproc_per_node=2 \
  --master_addr=127.0.0.1 --master_port=29601 \
  train.py --out out/base > out/base/log.txt 2>&1 &
first=$!

CUDA_VISIBLE_DEVICES=2,3 torchrun --nnodes=1 --nproc_per_node=2 \
  --master_addr=127.0.0.1 --master_port=29602 \
  train.py --out out/noaug --no-aug > out/noaug/log.txt 2>&1 &
second=$!

wait "$first"
wait "$second"
python compare.py out/base out/noaug
