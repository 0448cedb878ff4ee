#!/usr/bin/env bash
# Single-machine launcher for the lane detection models.
set -euo pipefail

usage() {
    echo "usage: $0 <config.yaml> [hydra overrides...]" >&2
    exit 2
}

[[ $# -ge 1 ]] || usage
CONFIG=$1
shift

if [[ ${SLURM_NNODES:-1} -gt 1 ]]; then
    echo "this script is for one node, use slurm/multi.sbatch" >&2
    exit 1
fi

NGPU=$(nvidia-smi --list-gpus | wc -l)
CORES=$(nproc)
RUN=$(basename "$CONFIG" .yaml)-$(date +%m%d-%H%M)
OUT=${OUT_ROOT:-$HOME/lane-runs}/$RUN
mkdir -p "$OUT"
cp "$CONFIG" "$OUT/config.yaml"

export OMP_NUM_THREADS=$(( CORES / NGPU > 8 ? 8 : CORES / NGPU ))
export PYTHONUNBUFFERED=1
export NCCL_DEBUG=WARN

# port 0: torchrun picks a free one, several runs may share the box
torchrun \
    --nnodes=1 \
    --nproc-per-node="$NGPU" \
    --rdzv-backend=c10d \
    --rdzv-endpoint=localhost:0 \
    --rdzv-id="$RUN" \
    -m lanes.train \
        --config-path "$OUT" --config-name config \
        output_dir="$OUT" \
        data.workers=$(( CORES / NGPU - 1 )) \
        "$@" 2>&1 | tee "$OUT/train.log"
