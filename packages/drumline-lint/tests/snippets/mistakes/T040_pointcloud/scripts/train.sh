#!/usr/bin/env bash
set -e
cd "$(dirname "$0")/.."
NGPU=${NGPU:-4}
torchrun --nproc_per_node="$NGPU" --master_port="${PORT:-29501}" tools/train.py --cfg cfgs/modelnet.json "$@"
