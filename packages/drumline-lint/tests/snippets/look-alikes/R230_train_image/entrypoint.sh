#!/bin/sh
set -eu

: "${CKPT_DIR:?CKPT_DIR must point to persistent storage}"
CONFIG=$1
shift

nproc_gpu=$(nvidia-smi --list-gpus | wc -l)
if [ "$nproc_gpu" -eq 0 ]; then
    echo "no GPU visible" >&2
    exit 1
fi

export PYTHONPATH=/opt/train/src
echo "image $GIT_SHA, $nproc_gpu GPUs, node ${NODE_RANK:-0} of ${NNODES:-1}"

exec torchrun \
    --nnodes="${NNODES:-1}" \
    --node-rank="${NODE_RANK:-0}" \
    --nproc-per-node="$nproc_gpu" \
    --master-addr="${MASTER_ADDR:-127.0.0.1}" \
    --master-port="${MASTER_PORT:-29500}" \
    src/train.py --config "$CONFIG" --checkpoint-dir "$CKPT_DIR" --resume auto "$@"
