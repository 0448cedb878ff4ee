#!/bin/bash
# Start training on our lab machines. Needs passwordless ssh and the repo on NFS.
#
#   ./launch_cluster.sh configs/resnet101.yaml

set -eu

CONFIG=${1:?usage: $0 CONFIG}
HOSTS=(gpu-a gpu-b gpu-c)
NGPU=4
PORT=29511
REPO=/nfs/projects/det
ENV_BIN=/nfs/envs/det/bin
LOGDIR=$REPO/logs/$(date +%m%d_%H%M)
mkdir -p "$LOGDIR"

MASTER=${HOSTS[0]}
NNODES=${#HOSTS[@]}

pids=()
cleanup() {
    echo "stopping..."
    for p in "${pids[@]}"; do
        kill "$p" 2>/dev/null || true
    done
}
trap cleanup INT TERM

i=0
for host in "${HOSTS[@]}"; do
    echo "starting on $host"
    ssh -o BatchMode=yes "$host" "cd $REPO && \
        export NCCL_SOCKET_IFNAME=eno1 OMP_NUM_THREADS=6 && \
        $ENV_BIN/torchrun \
            --nnodes=$NNODES \
            --nproc_per_node=$NGPU \
            --node_rank=0 \
            --master_addr=$MASTER \
            --master_port=$PORT \
            train.py --config $CONFIG" \
        > "$LOGDIR/$i-$host.log" 2>&1 &
    pids+=($!)
    i=$((i + 1))
done

echo "logs in $LOGDIR"
fail=0
for p in "${pids[@]}"; do
    wait "$p" || fail=1
done
exit $fail
