#!/usr/bin/env bash
# Starts one training process group over the hosts listed in hosts.txt.
set -euo pipefail

REPO=/mnt/shared/mistral-ft
HOSTS=$(cat "$REPO/hosts.txt")
STAMP=$(date +%Y%m%d-%H%M)
LOGS=$REPO/logs/$STAMP
mkdir -p "$LOGS"

pids=()
for host in $HOSTS; do
  echo "starting on $host"
  ssh -o StrictHostKeyChecking=no "$host" "
    cd $REPO && source venv/bin/activate &&
    NCCL_SOCKET_IFNAME=ens5 accelerate launch --config_file configs/multi_node.yaml \
      train.py --model mistralai/Mistral-7B-v0.1 --out runs/$STAMP
  " > "$LOGS/$host.log" 2>&1 &
  pids+=($!)
done

status=0
for pid in "${pids[@]}"; do
  wait "$pid" || status=1
done
exit $status
