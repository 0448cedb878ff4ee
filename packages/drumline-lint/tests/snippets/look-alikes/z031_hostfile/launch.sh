#!/usr/bin/env bash
# Run on gpu-a; the launcher reaches both machines by ssh (keys are in place, /nfs is shared).
set -euo pipefail

cd /nfs/embedder
source .venv/bin/activate

deepspeed \
    --hostfile hostfile \
    --master_addr gpu-a \
    --master_port 29555 \
    train_embedder.py \
    --deepspeed --deepspeed_config ds_config.json \
    --data /nfs/data/pairs \
    --save-dir /nfs/embedder/ckpt
