#!/usr/bin/env bash
# On each of two machines without a scheduler, with the same RUN_ID and FIRST on both.
set -euo pipefail
: "${RUN_ID:?}" "${FIRST:?the name of the first machine}"

torchrun --nnodes 2 --nproc-per-node 4 --rdzv-id "$RUN_ID" --rdzv-backend c10d --rdzv-endpoint "$FIRST:29400" train.py "$@"
