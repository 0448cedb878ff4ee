#!/bin/bash
# Started once per node by submit.sbatch.
set -euo pipefail

module load cuda/12.2 nccl/2.20
source /project/plm/venv/bin/activate

export MASTER_ADDR=$(hostname)
export OMP_NUM_THREADS=8
export NCCL_DEBUG=WARN

exec torchrun \
    --nnodes="$SLURM_NNODES" \
    --node_rank="$SLURM_NODEID" \
    --nproc_per_node=4 \
    --master_addr="$MASTER_ADDR" \
    --master_port="$MASTER_PORT" \
    train_plm.py \
    --fasta /project/plm/uniref50 \
    --out "$RUN_DIR"
