#!/usr/bin/env bash
set -euo pipefail
export NCCL_DEBUG=WARN
gpus=$(nvidia-smi -L | wc -l)
if [[ ${OLD:-} == 1 ]]; then
    python3 -m torch.distributed.launch --use_env --nproc_per_node="$gpus" train.py --out "${OUT:-out}" "$@"  # <- deprecated-launch
else
    torchrun --nnodes 1 --nproc-per-node "$gpus" --master-port 29501 train.py --out "${OUT:-out}" "$@"  # <- fixed-port
fi
