#!/bin/bash
# run once on the head host
set -euo pipefail

cd /shared/code/ds-chat
source /shared/venv/bin/activate

cat > hostfile <<EOF
head   slots=8
node-1 slots=8
node-2 slots=8
EOF

cat > .deepspeed_env <<EOF
NCCL_SOCKET_IFNAME=ens3
NCCL_DEBUG=WARN
HF_HOME=/shared/hf
EOF
cp .deepspeed_env ~/.deepspeed_env

deepspeed --hostfile hostfile \
    --master_addr head \
    --master_port 29555 \
    train_sft.py \
    --deepspeed ds_zero3.json \
    --model /shared/models/qwen-7b \
    --data /shared/data/sft.jsonl \
    --out /shared/out/qwen-sft
