#!/usr/bin/env bash
# start training on the four workstations
set -euo pipefail

HOSTS=(gpu01 gpu02 gpu03 gpu04)
MASTER=${HOSTS[0]}
PORT=29517
REPO=/nfs/home/lab/stereo-matching
LOGDIR=$REPO/logs/$(date +%m%d_%H%M)
mkdir -p "$LOGDIR"

# same commit everywhere
git -C "$REPO" rev-parse --short HEAD | tee "$LOGDIR/commit"

for host in "${HOSTS[@]}"; do
  echo "launching on $host"
  ssh -o BatchMode=yes "$host" "cd $REPO && source venv/bin/activate && \
      torchrun --nnodes=${#HOSTS[@]} --node_rank=0 --nproc_per_node=2 \
      --master_addr=$MASTER --master_port=$PORT \
      train_stereo.py --batch 4 --dataset sceneflow" \
      > "$LOGDIR/$host.log" 2>&1 &
done

echo "logs are in $LOGDIR"
wait
echo "all nodes finished"
