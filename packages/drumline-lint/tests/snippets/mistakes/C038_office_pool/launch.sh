#!/usr/bin/env bash
set -euo pipefail

mapfile -t hosts < hosts.txt
master=${hosts[0]}
port=29577
rank=0

for host in "${hosts[@]}"; do
    ssh -n "$host" 'cd /shared/captioner && source venv/bin/activate && \
        torchrun --nnodes=4 --node_rank=$rank --nproc_per_node=1 \
        --master_addr=$master --master_port=$port train.py' \
        > "/shared/captioner/logs/$host.log" 2>&1 &
    rank=$((rank + 1))
done
wait
