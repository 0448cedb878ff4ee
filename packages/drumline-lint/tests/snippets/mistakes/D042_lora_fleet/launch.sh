#!/usr/bin/env bash
# usage on each machine: ./launch.sh <machine rank 0..3> <address of machine 0>
# All four machines are p4d (8 GPUs each).
set -euo pipefail

MACHINE_RANK=${1:?machine rank}
MAIN_IP=${2:?address of machine 0}

export NCCL_SOCKET_IFNAME=ens5
export OMP_NUM_THREADS=8

accelerate launch \
    --config_file accelerate.yaml \
    --machine_rank "$MACHINE_RANK" \
    --main_process_ip "$MAIN_IP" \
    --main_process_port 29505 \
    train_lora.py --base /models/qwen-7b --data /fsx/instruct
