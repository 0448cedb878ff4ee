#!/usr/bin/env bash
# Pretraining on the two DGX boxes. Run on each of them:
#   dgx-01$ ./launch_two_nodes.sh 0
#   dgx-02$ ./launch_two_nodes.sh 1
set -euo pipefail

NODE_RANK=${1:?usage: $0 <node rank>}
NNODES=2
GPUS_PER_NODE=8
MASTER_ADDR=localhost
MASTER_PORT=29511

REPO=/shared/projects/medlm
RUN_NAME=medlm-1b3-$(cat "$REPO/RUN_ID")
OUT=/shared/runs/$RUN_NAME
LOGS=$OUT/logs
mkdir -p "$LOGS"

source /shared/envs/medlm/bin/activate
cd "$REPO"

export OMP_NUM_THREADS=8
export NCCL_SOCKET_IFNAME=ens10f0
export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
export NCCL_DEBUG=WARN
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
export HF_HOME=/shared/cache/hf
export TOKENIZERS_PARALLELISM=false

GLOBAL_BATCH=1024
MICRO_BATCH=8
ACCUM=$(( GLOBAL_BATCH / (MICRO_BATCH * NNODES * GPUS_PER_NODE) ))

echo "$(date -Is) node $NODE_RANK/$NNODES starting $RUN_NAME (accum $ACCUM)" | tee -a "$LOGS/node$NODE_RANK.log"

torchrun \
    --nnodes "$NNODES" \
    --nproc_per_node "$GPUS_PER_NODE" \
    --node_rank "$NODE_RANK" \
    --master_addr "$MASTER_ADDR" \
    --master_port "$MASTER_PORT" \
    pretrain.py \
    --config configs/1b3.yaml \
    --data /shared/data/medlm/tokenized \
    --micro-batch-size "$MICRO_BATCH" \
    --grad-accum "$ACCUM" \
    --max-steps 120000 \
    --checkpoint-dir "$OUT/ckpt" \
    --resume auto \
    2>&1 | tee -a "$LOGS/node$NODE_RANK.log"
