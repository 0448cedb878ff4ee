#!/bin/bash
# executed once on every node of the allocation
set -eo pipefail
cd /lustre/code/gpt

export NCCL_IB_HCA=mlx5
export OMP_NUM_THREADS=4

MASTER_PORT=$(( 20000 + RANDOM % 20000 ))
echo "$(hostname): node $SLURM_NODEID of $SLURM_NNODES, master $MASTER_ADDR:$MASTER_PORT"

DISTRIBUTED_ARGS=(
    --nproc_per_node 8
    --nnodes "$SLURM_NNODES"
    --node_rank "$SLURM_NODEID"
    --master_addr "$MASTER_ADDR"
    --master_port "$MASTER_PORT"
)

exec torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \
    --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size 4 --global-batch-size 512 \
    --train-iters 300000 --lr 2e-4 --lr-decay-style cosine \
    --data-path /lustre/data/pile_text_document --vocab-file vocab.json --merge-file merges.txt \
    --save /lustre/ckpt/gpt-1p3b --load /lustre/ckpt/gpt-1p3b --save-interval 1000 --bf16
