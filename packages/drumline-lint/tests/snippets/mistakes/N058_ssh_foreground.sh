#!/bin/bash
# usage: ./launch_cluster.sh config.yaml
set -e
CONFIG=${1:?config file}

IFS=$'\n' read -d '' -r -a NODES < hosts.txt || true
MASTER_ADDR=${NODES[0]}
MASTER_PORT=29555
NNODES=${#NODES[@]}
PROJECT=/shared/projects/panoptic

echo "launching on $NNODES nodes, master $MASTER_ADDR"

for i in "${!NODES[@]}"; do
    node=${NODES[$i]}
    echo "[$i] $node"
    ssh -n "$node" "cd $PROJECT && \
        OMP_NUM_THREADS=8 /shared/conda/envs/pan/bin/torchrun \
        --nnodes=$NNODES --node_rank=$i --nproc_per_node=8 \
        --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT \
        tools/train_net.py --config $CONFIG 2>&1 | tee -a logs/node_$i.log"
done

echo "training done, evaluating"
ssh -n "$MASTER_ADDR" "cd $PROJECT && /shared/conda/envs/pan/bin/python tools/eval.py --config $CONFIG"
