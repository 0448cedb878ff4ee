#!/bin/bash
# ./launch.sh hosts.txt configs/base.yaml
set -eu

HOSTFILE=${1:?hostfile}
CONFIG=${2:?config}
REPO=/nfs/projects/tts
NPROC=4

mapfile -t HOSTS < <(grep -v '^#' "$HOSTFILE")
HEAD=${HOSTS[0]}
RUN_ID=tts_$RANDOM
LOGDIR=$REPO/logs/$RUN_ID
mkdir -p "$LOGDIR"

echo "run $RUN_ID on ${#HOSTS[@]} hosts, rendezvous at $HEAD:29400"

pids=()
stop() {
    for p in "${pids[@]}"; do
        kill "$p" 2>/dev/null || true
    done
}
trap stop INT TERM

for host in "${HOSTS[@]}"; do
    ssh -n -tt -o BatchMode=yes "$host" "cd $REPO && \
        export OMP_NUM_THREADS=8 NCCL_SOCKET_IFNAME=ens5 && \
        venv/bin/torchrun \
            --nnodes=${#HOSTS[@]} \
            --nproc_per_node=$NPROC \
            --rdzv_id=$RUN_ID \
            --rdzv_backend=c10d \
            --rdzv_endpoint=$HEAD:29400 \
            train.py --config $CONFIG --run-id $RUN_ID" \
        > "$LOGDIR/$host.log" 2>&1 &
    pids+=($!)
done

rc=0
for p in "${pids[@]}"; do
    wait "$p" || rc=1
done
exit $rc
