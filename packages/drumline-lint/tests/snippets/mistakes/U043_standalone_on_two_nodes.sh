#!/usr/bin/env bash
#
# usage: NODE_RANK=0 HEAD=gpu-a ./scripts/train_2node.sh    (on gpu-a)
#        NODE_RANK=1 HEAD=gpu-a ./scripts/train_2node.sh    (on gpu-b)

set -euo pipefail

: "${NODE_RANK:?set NODE_RANK to 0 or 1}"
: "${HEAD:?set HEAD to the host name of node 0}"

NNODES=2
GPUS=8
PORT=${PORT:-29501}

export OMP_NUM_THREADS=10
export NCCL_IB_DISABLE=0
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export PYTHONPATH=$PWD:${PYTHONPATH:-}

EXTRA=()
if [[ -f /mnt/nfs/runs/wav2vec/last.pt ]]; then
  EXTRA+=(--resume /mnt/nfs/runs/wav2vec/last.pt)
fi

echo "[$(hostname)] node $NODE_RANK of $NNODES, head $HEAD:$PORT"

exec torchrun \
  --standalone \
  --nnodes=$NNODES \
  --node_rank="$NODE_RANK" \
  --nproc_per_node=$GPUS \
  --master_addr="$HEAD" \
  --master_port="$PORT" \
  pretrain.py \
  --manifest /mnt/nfs/librilight/train.tsv \
  --save-dir /mnt/nfs/runs/wav2vec \
  --max-tokens 1400000 \
  "${EXTRA[@]}"
