#!/bin/bash
# Same script for the ethernet-only teaching cluster and for the IB nodes.
# usage: node.sh <node_rank> <nnodes> <master host>
set -euo pipefail

NODE_RANK=${1:?}
NNODES=${2:?}
MASTER=${3:?}

if ! compgen -G "/sys/class/infiniband/*" > /dev/null; then
    export NCCL_IB_DISABLE=1
fi

export OMP_NUM_THREADS=4
exec torchrun \
    --nnodes="$NNODES" --node_rank="$NODE_RANK" --nproc_per_node=gpu \
    --master_addr="$MASTER" --master_port=29500 \
    train.py --config configs/course.yaml
