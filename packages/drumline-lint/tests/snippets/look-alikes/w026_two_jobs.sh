#!/usr/bin/env bash
# Overnight: teacher on GPUs 0-3 and baseline on GPUs 4-7 of the same server.
set -u
cd "$(dirname "$0")"
mkdir -p logs
export OMP_NUM_THREADS=8

launch() {
    local name=$1 gpus=$2 port=$3
    shift 3
    CUDA_VISIBLE_DEVICES=$gpus torchrun \
        --nnodes=1 --node_rank=0 --nproc_per_node=4 \
        --master_addr=localhost --master_port="$port" \
        train.py --name "$name" --workers 6 "$@" \
        > "logs/$name.log" 2>&1 &
}

launch teacher 0,1,2,3 29510 --arch vit_large --epochs 100
launch baseline 4,5,6,7 29520 --arch vit_small --epochs 300

failed=0
for job in $(jobs -p); do
    wait "$job" || failed=$((failed + 1))
done

echo "$(date): finished, $failed failed" | tee -a logs/summary.txt
exit "$failed"
