#!/usr/bin/env bash
set -euo pipefail

HOSTS=(ws1 ws2 ws3)
MASTER=${HOSTS[0]}
PORT=29519
REPO=/nfs/projects/monodepth
LOGS=$REPO/logs/$(date +%Y%m%d_%H%M%S)
mkdir -p "$LOGS"

pids=()
for i in "${!HOSTS[@]}"; do
    host=${HOSTS[$i]}
    ssh -n -o BatchMode=yes "$host" "cd $REPO && source venv/bin/activate && \
        OMP_NUM_THREADS=8 torchrun --nnodes=${#HOSTS[@]} --node_rank=$i --nproc_per_node=2 \
        --master_addr=$MASTER --master_port=$PORT train.py --split eigen_zhou" \
        > "$LOGS/$host.log" 2>&1 &
    pids+=($!)
done

rc=0
for p in "${pids[@]}"; do
    wait "$p" || rc=1
done
tail -n 2 "$LOGS"/*.log
exit $rc
