#!/usr/bin/env bash
set -euo pipefail

SEEDS=(1 2)
DATA=/data/kinetics400
OUT=/results/timesformer
PORT=29500

source /opt/venv/bin/activate
export OMP_NUM_THREADS=8

launch() {
    local seed=$1 gpus=$2
    local dir=$OUT/seed$seed
    mkdir -p "$dir"
    CUDA_VISIBLE_DEVICES=$gpus torchrun \
        --nnodes=1 --node_rank=0 \
        --nproc_per_node=4 \
        --master_addr=127.0.0.1 --master_port=$PORT \
        train.py \
        --data "$DATA" \
        --seed "$seed" \
        --clip-len 8 --batch-size 8 \
        --output "$dir" \
        > "$dir/train.log" 2>&1 &
    echo "seed $seed on GPUs $gpus: pid $!"
}

launch "${SEEDS[0]}" 0,1,2,3
launch "${SEEDS[1]}" 4,5,6,7

fail=0
for job in $(jobs -p); do
    wait "$job" || fail=1
done

if [[ $fail -eq 0 ]]; then
    python summarize.py --runs "$OUT"/seed* --table "$OUT/table.csv"
fi
exit $fail
