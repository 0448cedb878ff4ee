#!/usr/bin/env bash
set -euo pipefail
export NCCL_DEBUG=WARN
gpus=$(nvidia-smi -L | wc -l)
torchrun --standalone --nproc-per-node "$gpus" train.py --out "${OUT:-out}" "$@"
