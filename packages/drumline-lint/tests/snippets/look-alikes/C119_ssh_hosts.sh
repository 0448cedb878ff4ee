#!/usr/bin/env bash
set -euo pipefail

hosts=(render1 render2 render3)
master=${hosts[0]}
port=29520
mkdir -p logs
pids=()

for rank in "${!hosts[@]}"; do
    host=${hosts[$rank]}
    ssh -n "$host" "cd /mnt/shared/gaussians && source venv/bin/activate && \
        OMP_NUM_THREADS=4 torchrun --nnodes=${#hosts[@]} --node_rank=$rank --nproc_per_node=2 \
        --master_addr=$master --master_port=$port train.py --scene garden" \
        > "logs/$host.log" 2>&1 &
    pids+=($!)
done

status=0
for pid in "${pids[@]}"; do
    wait "$pid" || status=1
done
exit $status
