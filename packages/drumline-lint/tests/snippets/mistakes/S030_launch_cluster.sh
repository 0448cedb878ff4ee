#!/usr/bin/env bash
# Start the detector training on the four lab machines.
#   ./launch_cluster.sh configs/rtdetr.yaml
set -euo pipefail

CONFIG=${1:?config file}
HOSTS=(gpu01 gpu02 gpu03 gpu04)
MASTER=${HOSTS[0]}
PORT=29555
STAMP=$(date +%Y%m%d-%H%M%S)
REPO=/nfs/vision/detect
LOGDIR=$REPO/logs/$STAMP
mkdir -p "$LOGDIR"

pids=()
for host in "${HOSTS[@]}"; do
  echo "starting on $host"
  ssh -o BatchMode=yes "$host" "cd $REPO && source .venv/bin/activate && \
    NCCL_SOCKET_IFNAME=enp65s0 torchrun \
      --nnodes=${#HOSTS[@]} \
      --node_rank=0 \
      --nproc_per_node=4 \
      --master_addr=$MASTER --master_port=$PORT \
      train.py --config $CONFIG --run $STAMP" \
    > "$LOGDIR/$host.log" 2>&1 &
  pids+=($!)
done

status=0
for pid in "${pids[@]}"; do
  wait "$pid" || status=$?
done
echo "finished with status $status, logs in $LOGDIR"
exit "$status"
