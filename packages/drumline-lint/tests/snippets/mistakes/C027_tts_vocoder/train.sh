#!/bin/bash
set -euo pipefail

export CUDA_DEVICE_ORDER=PCI_BUS_ID
export OMP_NUM_THREADS=4
RUN=${1:-hifigan_v1}

torchrun --standalone --nproc_per_node=4 \
    vocoder.py --wavs /data/libritts --run "runs/$RUN"
