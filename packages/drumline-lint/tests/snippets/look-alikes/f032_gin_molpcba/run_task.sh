#!/bin/bash
# started by srun once per task
export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID
exec python train.py
