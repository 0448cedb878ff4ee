#!/usr/bin/env bash
# usage: ./ssh_nodes.sh configs/asr.yaml
set -euo pipefail

CONFIG=$1
mapfile -t HOSTS < hostfile
N=${#HOSTS[@]}
MASTER=${HOSTS[0]}
RUN=$(date +%Y%m%d-%H%M%S)
mkdir -p "logs/$RUN"

pids=()
for i in "${!HOSTS[@]}"; do
  ssh -n -o BatchMode=yes "${HOSTS[$i]}" \
    "cd $PWD && source .venv/bin/activate && \
     torchrun --nnodes=$N --node_rank=$i --nproc_per_node=gpu \
       --master_addr=$MASTER --master_port=29620 \
       train_asr.py --config $CONFIG --run $RUN" > "logs/$RUN/node$i.log" 2>&1 &
  pids+=($!)
done

rc=0
for p in "${pids[@]}"; do wait "$p" || rc=1; done
exit $rc
