#!/bin/bash
set -e
export CUDA_VISIBLE_DEVICES=0,1,2,3
export OMP_NUM_THREADS=4
mkdir -p out

python train.py --data /data/ms1mv3/images --out out/face.pt --epochs 20 --batch-size 128
