#!/usr/bin/env bash
# On each of two machines without a scheduler, with the same FIRST on both.
set -euo pipefail
: "${FIRST:?the name of the first machine}"

torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint "$FIRST:29400" train.py "$@"
