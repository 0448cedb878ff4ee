#!/bin/bash
# usage: ssh in, run this script, log out and look at the log tomorrow
set -euo pipefail
cd ~/projects/rotated-detector
source venv/bin/activate

GPUS=${GPUS:-4}
CONFIG=${1:?config file}
WORK=work_dirs/$(basename "$CONFIG" .py)
mkdir -p "$WORK"
export OMP_NUM_THREADS=4

nohup torchrun --standalone --nproc_per_node="$GPUS" \
    tools/train.py "$CONFIG" \
    --work-dir "$WORK" \
    --launcher pytorch \
    > "$WORK/train.log" 2>&1 &

echo $! > "$WORK/train.pid"
echo "started with pid $(cat "$WORK/train.pid"), log in $WORK/train.log"
