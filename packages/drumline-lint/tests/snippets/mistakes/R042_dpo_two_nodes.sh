#!/bin/bash
# Run on each of the two boxes:  NODE_RANK=0 ./launch_2node.sh   /   NODE_RANK=1 ./launch_2node.sh
set -eu

NODE_RANK=${NODE_RANK:?set NODE_RANK to 0 or 1}
MASTER_ADDR=${MASTER_ADDR:-10.24.8.11}
MASTER_PORT=${MASTER_PORT:-29511}
NNODES=2
NPROC=8

EXP=${EXP:-qwen2-7b-dpo}
BASE=/nfs/alignment
OUT=$BASE/exp/$EXP
LOGDIR=$OUT/logs
mkdir -p "$LOGDIR"

source $BASE/venv/bin/activate
cd $BASE/code

ulimit -l unlimited
ulimit -n 65536

export CUDA_DEVICE_MAX_CONNECTIONS=1
export OMP_NUM_THREADS=8
export TOKENIZERS_PARALLELISM=false
export HF_DATASETS_OFFLINE=1
export TRANSFORMERS_OFFLINE=1

# comms
export NCCL_DEBUG=INFO
export NCCL_SOCKET_IFNAME=lo
export NCCL_IB_GID_INDEX=3
export NCCL_IB_TIMEOUT=22
export TORCH_NCCL_TRACE_BUFFER_SIZE=2000

if ! ping -c 1 -W 2 "$MASTER_ADDR" > /dev/null; then
    echo "cannot reach $MASTER_ADDR" >&2
    exit 1
fi

echo "[$(hostname)] node $NODE_RANK/$NNODES -> $MASTER_ADDR:$MASTER_PORT"

torchrun \
    --nnodes=$NNODES \
    --nproc-per-node=$NPROC \
    --node-rank="$NODE_RANK" \
    --master-addr="$MASTER_ADDR" \
    --master-port="$MASTER_PORT" \
    dpo.py \
        --policy $BASE/models/qwen2-7b-sft \
        --pairs $BASE/data/prefs_v5 \
        --beta 0.1 \
        --lr 5e-7 \
        --per_device_batch 2 \
        --grad_accum 4 \
        --output_dir "$OUT" \
        2>&1 | tee -a "$LOGDIR/node$NODE_RANK.log"
