#!/bin/bash
#
# Train the recommender on one 8-GPU server.
#
set -e

NGPU=8
DATA_DIR=/raid/criteo
OUT_DIR=/raid/out/dlrm_$(date +%s)
mkdir -p "$OUT_DIR"

export OMP_NUM_THREADS=4
export NCCL_DEBUG=WARN

if [ ! -f "$DATA_DIR/day_0.npz" ]; then
  echo "run preprocess.sh first" >&2
  exit 1
fi

mpirun --allow-run-as-root -np $NGPU --bind-to socket \
  torchrun --nproc_per_node=$NGPU --master_port=29700 \
    dlrm_main.py \
      --in_memory_binary_criteo_path "$DATA_DIR" \
      --embedding_dim 128 \
      --over_arch_layer_sizes 1024,1024,512,256,1 \
      --dense_arch_layer_sizes 512,256,128 \
      --epochs 1 \
      --checkpoint "$OUT_DIR/dlrm.pt"
