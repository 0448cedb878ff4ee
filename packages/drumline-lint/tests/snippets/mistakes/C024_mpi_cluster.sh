#!/bin/bash
# 2 hosts, 8 GPUs each. train.py takes rank and size from OMPI_COMM_WORLD_*.
set -euo pipefail

HOSTS=gpu-a:8,gpu-b:8
export MASTER_ADDR=gpu-a
export MASTER_PORT=29417
export NCCL_SOCKET_IFNAME=ens5
export OMP_NUM_THREADS=8

DATA=${DATA:-/mnt/nfs/imagenet}
OUT=${OUT:-/mnt/nfs/runs/$(date +%m%d_%H%M)}
mkdir -p "$OUT"

mpirun -np 16 \
    --host "$HOSTS" \
    --bind-to none \
    --map-by slot \
    --mca btl_tcp_if_include ens5 \
    --output-filename "$OUT/logs" \
    /mnt/nfs/envs/mm/bin/python train.py --data "$DATA" --out "$OUT" --launcher mpi
