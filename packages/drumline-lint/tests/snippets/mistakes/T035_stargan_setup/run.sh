#!/bin/bash
export OMP_NUM_THREADS=4
torchrun --standalone --nproc_per_node=4 main.py --cfg cfg/afhq.yaml --mode train
