#!/usr/bin/env bash
# Launch GNN pretraining on a handful of workstations.
set -euo pipefail

HOSTFILE=${HOSTFILE:-hosts.txt}
CONFIG=${1:?usage: run_on_hosts.sh config.yaml}
GPUS=${GPUS:-2}
PORT=${PORT:-29700}
WORKDIR=/shared/gnn-pretrain

mapfile -t hosts < <(grep -v '^#' "$HOSTFILE" | awk '{print $1}')
nnodes=${#hosts[@]}
master=${hosts[0]}
stamp=$(date +%Y%m%d_%H%M%S)
logdir=$WORKDIR/logs/$stamp
mkdir -p "$logdir"

echo "$nnodes nodes, master $master:$PORT"

stop_all() {
    for pid in "${pids[@]:-}"; do
        kill "$pid" 2>/dev/null || true
    done
}
trap stop_all INT TERM

pids=()
node_rank=0
for host in "${hosts[@]}"; do
    ssh -tt -o BatchMode=yes "$host" "
        cd $WORKDIR &&
        source venv/bin/activate &&
        OMP_NUM_THREADS=4 NCCL_SOCKET_IFNAME=enp4s0 \
        torchrun --nnodes=$nnodes --node_rank=$node_rank --nproc_per_node=$GPUS \
            --master_addr=$master --master_port=$PORT \
            pretrain.py --config $CONFIG --run-id $stamp
    " > "$logdir/node$node_rank.log" 2>&1 < /dev/null &
    pids+=($!)
    node_rank=$((node_rank + 1))
done

rc=0
for pid in "${pids[@]}"; do
    wait "$pid" || rc=1
done
exit $rc
