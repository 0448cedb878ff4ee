#!/bin/bash
# two DGX boxes, Open MPI 4.1
set -euo pipefail

cat > hostfile <<EOF
dgx-a slots=8
dgx-b slots=8
EOF

export MASTER_ADDR=dgx-a
export MASTER_PORT=23900

PY=/opt/conda/envs/mt/bin/python
SCRIPT=/nfs/mt/train_mpi.py

# the script maps OMPI_COMM_WORLD_RANK / LOCAL_RANK / SIZE to RANK, LOCAL_RANK, WORLD_SIZE
mpirun -np 16 \
    --hostfile hostfile \
    --map-by ppr:8:node \
    --bind-to none \
    -mca pml ob1 -mca btl ^openib \
    -mca btl_tcp_if_include eth0 \
    $PY $SCRIPT \
        --epochs 40 \
        --batch-size 128 \
        --amp \
        --output /nfs/mt/runs/big \
    2>&1 | tee train_$(date +%F).log
