#!/usr/bin/env bash
# Start the recommender on the three lab machines.
# usage: ./D030_ssh_cluster.sh [run-name]
set -euo pipefail

RUN=${1:-$(date +%Y%m%d-%H%M)}
HOSTS=(gpu01.lab gpu02.lab gpu03.lab)
GPUS=4
PORT=29710
CODE=/nfs/projects/reco
LOGS=/nfs/logs/reco/$RUN
mkdir -p "$LOGS"

MASTER=${HOSTS[0]}
NNODES=${#HOSTS[@]}

for h in "${HOSTS[@]}"; do
    ssh -o ConnectTimeout=5 "$h" true || { echo "$h does not answer"; exit 1; }
done

stop_all() {
    echo "stopping"
    for h in "${HOSTS[@]}"; do
        ssh "$h" "pkill -u $USER -f 'reco.train --run $RUN'" || true
    done
}
trap stop_all INT TERM

pids=()
for i in "${!HOSTS[@]}"; do
    h=${HOSTS[$i]}
    echo "starting node $i on $h"
    ssh "$h" "cd $CODE && source .venv/bin/activate && \
        export NCCL_SOCKET_IFNAME=eno1 OMP_NUM_THREADS=6 && \
        torchrun --nnodes=$NNODES --nproc_per_node=$GPUS \
            --node_rank=$i --master_addr=\$(hostname -f) --master_port=$PORT \
            -m reco.train --run $RUN --batch 8192 --epochs 12" \
        > "$LOGS/node$i.log" 2>&1 &
    pids+=($!)
done

status=0
for p in "${pids[@]}"; do
    wait "$p" || status=$?
done
echo "all nodes ended, status $status; logs in $LOGS (head was $MASTER)"
exit $status
