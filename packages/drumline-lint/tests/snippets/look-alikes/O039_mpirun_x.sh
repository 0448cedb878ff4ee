#!/bin/bash
# Open MPI 4 on the InfiniBand partition
set -euo pipefail

HOSTFILE=/etc/mpi/hostfile
NP=$(awk '{split($2,a,"="); s+=a[2]} END {print s}' "$HOSTFILE")
export MASTER_ADDR=$(head -n 1 "$HOSTFILE" | awk '{print $1}')
export MASTER_PORT=29345
export NCCL_SOCKET_IFNAME=ib0
export OMP_NUM_THREADS=6

echo "starting $NP processes, master $MASTER_ADDR:$MASTER_PORT"

# train_mpi.py maps OMPI_COMM_WORLD_* to RANK / LOCAL_RANK / WORLD_SIZE
mpirun -np "$NP" \
    --hostfile "$HOSTFILE" \
    --bind-to none --map-by slot \
    -x MASTER_ADDR -x MASTER_PORT \
    -x NCCL_SOCKET_IFNAME -x OMP_NUM_THREADS \
    -x PATH -x LD_LIBRARY_PATH \
    -mca pml ob1 -mca btl ^openib \
    /opt/conda/bin/python /nfs/code/train_mpi.py \
        --config /nfs/code/configs/large.yaml \
        --resume auto \
        --out /nfs/ckpt/large
