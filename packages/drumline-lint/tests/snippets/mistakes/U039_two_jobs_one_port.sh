#!/usr/bin/env bash
# Ablation pair on a single 8-GPU box: baseline on the first four cards,
# variant on the other four.
set -u

ROOT=$(cd "$(dirname "$0")/.." && pwd)
cd "$ROOT"
source venv/bin/activate

export OMP_NUM_THREADS=8
export MASTER_ADDR=127.0.0.1
export MASTER_PORT=29500

launch() {
    local name=$1 gpus=$2 cfg=$3
    mkdir -p "runs/$name"
    CUDA_VISIBLE_DEVICES=$gpus torchrun \
        --nnodes=1 \
        --nproc_per_node=4 \
        --master_addr="$MASTER_ADDR" \
        --master_port="$MASTER_PORT" \
        train.py --config "$cfg" --out "runs/$name" \
        > "runs/$name/log.txt" 2>&1
}

launch baseline 0,1,2,3 configs/base.yaml &
pid_a=$!
launch rope     4,5,6,7 configs/rope.yaml &
pid_b=$!

trap 'kill $pid_a $pid_b 2>/dev/null' INT TERM

wait $pid_a; echo "baseline finished with $?"
wait $pid_b; echo "rope finished with $?"

python tools/compare.py runs/baseline runs/rope > runs/compare.md
