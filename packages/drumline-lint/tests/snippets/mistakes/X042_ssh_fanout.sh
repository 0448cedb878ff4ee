#!/usr/bin/env bash
# Start one torchrun on every host of the lab cluster over ssh.
set -euo pipefail

HOSTS=(lab01 lab02 lab03)
MASTER=${HOSTS[0]}
GPUS=4
WORKDIR=/nfs/projects/tts
LOGS=$WORKDIR/logs/$(date +%Y%m%d-%H%M%S)
mkdir -p "$LOGS"

pids=()
for host in "${HOSTS[@]}"; do
    ssh -o BatchMode=yes "$host" "
        cd $WORKDIR && source venv/bin/activate &&
        OMP_NUM_THREADS=8 torchrun \
            --nnodes=${#HOSTS[@]} \
            --node_rank=0 \
            --nproc_per_node=$GPUS \
            --master_addr=$MASTER \
            --master_port=29777 \
            train_tts.py --config conf/vits.yaml
    " > "$LOGS/$host.log" 2>&1 &
    pids+=($!)
done

status=0
for pid in "${pids[@]}"; do
    wait "$pid" || status=$?
done
exit $status
