#!/usr/bin/env bash
# Start language-model pretraining on the lab machines over ssh.
# usage: ./launch_cluster.sh configs/gpt_small.yaml
set -euo pipefail

CONFIG=${1:-configs/gpt_small.yaml}
RUN_NAME=${RUN_NAME:-$(basename "$CONFIG" .yaml)-$(date +%m%d-%H%M)}

HOSTS=(turing hopper lovelace noether)
GPUS_PER_HOST=4
MASTER=${HOSTS[0]}
PORT=29600

REPO=/nfs/projects/gpt
LOGS=/nfs/projects/gpt/logs/$RUN_NAME
NODE_RANK=0
mkdir -p "$LOGS"

cleanup() {
    echo "stopping workers"
    for host in "${HOSTS[@]}"; do
        ssh "$host" "test -f $LOGS/$host.pid && kill \$(cat $LOGS/$host.pid)" || true
    done
}
trap cleanup INT TERM

pids=()
for host in "${HOSTS[@]}"; do
    echo "launching on $host"
    ssh "$host" "
        cd $REPO && source .venv/bin/activate
        export NCCL_SOCKET_IFNAME=eno1
        export OMP_NUM_THREADS=4
        echo \$\$ > $LOGS/$host.pid
        exec torchrun \
            --nnodes ${#HOSTS[@]} \
            --node_rank $NODE_RANK \
            --nproc_per_node $GPUS_PER_HOST \
            --master_addr $MASTER \
            --master_port $PORT \
            train.py --config $CONFIG --run_name $RUN_NAME
    " > "$LOGS/$host.log" 2>&1 &
    pids+=($!)
done

status=0
for pid in "${pids[@]}"; do
    wait "$pid" || status=$?
done
echo "run $RUN_NAME finished with status $status"
exit "$status"
