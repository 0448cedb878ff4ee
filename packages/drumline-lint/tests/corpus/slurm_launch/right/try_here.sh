#!/usr/bin/env bash
# Two processes on this machine, to see that the script still runs.
set -eu
cd "$(dirname "$0")"
export NCCL_DEBUG=INFO
torchrun --standalone --nproc-per-node "${1:-2}" train.py --epochs 1 --folder "$(mktemp -d)"
