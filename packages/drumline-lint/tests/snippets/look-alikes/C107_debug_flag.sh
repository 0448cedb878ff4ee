#!/bin/bash
set -euo pipefail
cd "$(dirname "$0")"
source venv/bin/activate

DEBUG=${DEBUG:-0}
EXTRA=()
export OMP_NUM_THREADS=8

if [[ $DEBUG == 1 ]]; then
    export CUDA_LAUNCH_BLOCKING=1
    export TORCH_DISTRIBUTED_DEBUG=DETAIL
    export NCCL_DEBUG=INFO
    EXTRA+=(--max-steps 20 --no-checkpoint)
fi

torchrun --standalone --nproc_per_node=gpu \
    -m tracker.train --config configs/tracker.yaml "${EXTRA[@]}" "$@"
