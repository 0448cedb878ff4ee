#!/bin/bash
torchrun --standalone --nproc_per_node=4 train.py --config configs/coco.yaml --name "$1"
