#!/bin/bash
# air-gapped workstation, 4 GPUs; the only external NIC is down most of the time
set -euo pipefail

cd "$(dirname "$0")"
source venv/bin/activate

export NCCL_SOCKET_IFNAME=lo
export GLOO_SOCKET_IFNAME=lo
export NCCL_IB_DISABLE=1
export OMP_NUM_THREADS=8
export HF_HUB_OFFLINE=1

OUT=/data/out/radiology_$(date +%Y%m%d)
mkdir -p "$OUT"

torchrun --nnodes=1 --nproc_per_node=4 \
    --master_addr=127.0.0.1 --master_port=29571 \
    train_reports.py \
    --tokenizer /data/models/biobert \
    --images /data/mimic \
    --reports /data/mimic/reports.csv \
    --batch-size 12 \
    --epochs 15 \
    --out "$OUT" 2>&1 | tee "$OUT/train.log"
