#!/usr/bin/env bash
# Starts multi-node training on the lab machines (same checkout on NFS on every host).
set -euo pipefail

HOSTS=(lab-gpu01 lab-gpu02 lab-gpu03)
GPUS_PER_HOST=4
PORT=29555
WORKDIR=/nfs/projects/depth-estimation
ENV_ACTIVATE="source /nfs/envs/depth/bin/activate"
STAMP=$(date +%Y%m%d-%H%M%S)
LOGDIR=$WORKDIR/logs/$STAMP
mkdir -p "$LOGDIR"

MASTER=$(getent hosts "${HOSTS[0]}" | awk '{print $1; exit}')

cleanup() {
    for host in "${HOSTS[@]}"; do
        ssh "$host" "pkill -u $USER -f 'train_depth.py --stamp $STAMP'" || true
    done
}
trap cleanup INT TERM

pids=()
for i in "${!HOSTS[@]}"; do
    host=${HOSTS[$i]}
    ssh "$host" "$ENV_ACTIVATE && cd $WORKDIR && \
        NCCL_SOCKET_IFNAME=eno1 OMP_NUM_THREADS=4 \
        torchrun --nnodes=${#HOSTS[@]} --nproc_per_node=$GPUS_PER_HOST \
        --node_rank=0 --master_addr=$MASTER --master_port=$PORT \
        train_depth.py --stamp $STAMP --config configs/nyu.yaml" \
        > "$LOGDIR/node$i.log" 2>&1 &
    pids+=($!)
done

for pid in "${pids[@]}"; do
    wait "$pid"
done
echo "all nodes finished, logs in $LOGDIR"
