#!/usr/bin/env bash
# Train on the workstations listed in hosts.txt (one name per line, first is the master).
set -euo pipefail

HOSTFILE=${1:-hosts.txt}
TAG=${2:-$(date +%m%d-%H%M)}
mapfile -t HOSTS < <(grep -v '^#' "$HOSTFILE")
N=${#HOSTS[@]}
ADDR=$(getent ahostsv4 "${HOSTS[0]}" | awk 'NR == 1 {print $1}')
PORT=$(( 20000 + RANDOM % 20000 ))
ROOT=/nfs/code/layout
LOG=/nfs/logs/layout/$TAG
mkdir -p "$LOG"

echo "$N nodes, master $ADDR:$PORT, logs in $LOG"

remote() {
    # $1 node rank; the rest of the values go through the environment of the remote shell
    cat <<EOF
cd $ROOT
source venv/bin/activate
export OMP_NUM_THREADS=4
export GLOO_SOCKET_IFNAME=\$(ip -o -4 route show default | awk 'NR == 1 {print \$5}')
export NCCL_SOCKET_IFNAME=\$GLOO_SOCKET_IFNAME
echo "node $1 on \$(hostname) through \$NCCL_SOCKET_IFNAME"
exec torchrun \\
    --nnodes=$N \\
    --nproc_per_node=2 \\
    --node_rank=$1 \\
    --master_addr=$ADDR \\
    --master_port=$PORT \\
    train.py --tag $TAG
EOF
}

pids=()
rank=0
for host in "${HOSTS[@]}"; do
    remote "$rank" | ssh -o BatchMode=yes "$host" bash -s > "$LOG/$host.log" 2>&1 &
    pids+=("$!")
    rank=$((rank + 1))
done

failed=0
for p in "${pids[@]}"; do
    wait "$p" || failed=1
done
exit "$failed"
